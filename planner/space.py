"""The fields that a search may vary, and the values of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.allowed_code import AllowedCode
from ..engine.errors import DsimError, PolicyError
from ..engine.outside import is_file
from ..engine.part import FITTED
from ..engine.policies import BASELINES
from ..engine.spec import PRESETS, Policy, parse, preset_of, settings_of
from ..files.read import FilePath, did_you_mean, quoted, read_toml
from ..profiler.profile import Profile
from ..results.world import World
from ..sim.memory import check_fits
from ..sim.setting import Setting
from ..traces import Trace
from .candidate import POLICY, REPLICAS, Candidate, refusal, spelt, with_fields
from .deploy import times_another

Check = Callable[[Policy], object]  # DsimError if the policy cannot run


@dataclass(frozen=True)
class Space:
    """The values of `policy`, and of `PRESET.FIELD` (`PRESET.replicas`) of each preset."""

    world: World
    values: Mapping[str, tuple[Any, ...]]

    @property
    def presets(self) -> tuple[str, ...]:
        return self.values[POLICY]

    def of(self, preset: str) -> dict[str, tuple[Any, ...]]:
        """The values of a preset's fields."""
        prefix = f"{preset}."
        return {name.removeprefix(prefix): v for name, v in self.values.items() if name.startswith(prefix)}

    def candidate(self, preset: str, fields: Mapping[str, Any]) -> Candidate:
        """Fields that are not given are the preset's."""
        point = {name if name == REPLICAS else f"{POLICY}.{name}": value for name, value in fields.items()}
        columns = {f"{preset}.{name}": spelt(value) for name, value in fields.items()}
        return Candidate.at(self.world, {POLICY: preset, **point}, columns)


def space_of(world: World, table: Mapping[str, Any] | FilePath | None = None, *, also: Sequence[str] = ()) -> Space:
    """The space of a table or TOML file; without one, values worth trying on any traffic (docs/tune.md).

    A table has `policy = [presets]`, fields for all of them, and tables for single presets. also: presets that a
    default space includes. DsimError for unknown fields, for values that every preset refuses, and for those of a
    preset's own table that it refuses.
    """
    check = searchable(world.loaded_profile(), world.workload)
    source, content = "space", table
    if table is None:
        content = _default(world, check, also)
    elif not isinstance(table, Mapping):
        source, content = str(table), read_toml(table)
    assert isinstance(content, Mapping)
    names = _presets(content, source, check)
    values: dict[str, tuple[Any, ...]] = {POLICY: tuple(names)}
    tables = {name: fields for name, fields in content.items() if isinstance(fields, Mapping)}
    shared = {name: choices for name, choices in content.items() if name not in tables and name != POLICY}
    refusals: dict[tuple[str, str], DsimError | None] = {}  # of shared values; None: a preset takes it
    for name in tables:
        if name not in names:
            raise DsimError(f"{source}: [{name}] is given, and policy is {', '.join(names)}: expected it among them")
    for name in names:
        fault = refusal(lambda name=name: check(preset_of(name, allow_code=world.allow_code).policy))
        if fault is not None:
            raise type(fault)(f"{source}: {name}: {fault}")
        fields = tables.get(name, {})
        for field, choices in {**shared, **fields}.items():
            if choices in ([], {}):
                raise DsimError(f"{source}: {field} is {quoted(choices)}, expected a list of values")
            faults = _faults(world, name, field, choices, check)
            if field in fields:
                refusals |= {(f"{name}.{field}", spelt(value)): fault for value, fault in faults}
            else:
                for value, fault in faults:
                    refusals[field, spelt(value)] = fault and refusals.get((field, spelt(value)), fault)
            if fitting := {spelt(value): value for value, fault in faults if fault is None}:  # each once
                values[f"{name}.{field}"] = tuple(fitting.values())
    for fault in filter(None, refusals.values()):
        if table is not None:  # the default leaves out what does not fit
            raise DsimError(f"{source}: {fault}")
    return Space(world, values)


def _default(world: World, check: Check, also: Sequence[str]) -> dict[str, Any]:
    """A table of presets of released engines, and of `also`, with their own spaces.

    An engine's preset is included if the step times are that engine's, or no engine's. Without one: all presets.
    """
    profile = world.loaded_profile()
    names = [name for name, p in PRESETS.items() if p.policy.family == profile.family and not times_another(profile, p)]
    if any(PRESETS[name].engine for name in names):
        names = [name for name in names if PRESETS[name].engine or name in also]
    names = [name for name in names if PRESETS[name].space is not None]
    # The latest full-sequence system first. A stored search's inputs contain the order.
    full = [name for name in names if PRESETS[name].policy.family == "full-sequence"]
    names = [name for name in names if name not in full] + full[::-1] + [name for name in also if name not in PRESETS]
    presets = {name: preset_of(name, allow_code=world.allow_code) for name in names}
    presets = {name: preset for name, preset in presets.items() if refusal(check, preset.policy) is None}
    if not presets:
        check(PRESETS[BASELINES[profile.family]].policy)
    table: dict[str, Any] = {POLICY: list(presets)}
    for name, preset in presets.items():
        idle = preset.policy.granularity.idle
        space = {field: choices for field, choices in (preset.space or {}).items() if field not in idle}
        if space.pop(FITTED, False):
            space |= fitted_at(profile, world.workload)
        table[name] = space
    return table


def fitted_at(profile: Profile, workload: str | None) -> dict[str, list[Any]]:
    """Block lengths and thresholds of the profile's yields, if there are several."""
    name = workload or next((model.workload for model in profile.commits), "")
    models = [model for model in profile.commits if model.workload == name]
    fitted: dict[str, list[Any]] = {
        "block_length": sorted({model.block_length for model in models if model.extrapolated_from is None}),
        "threshold": sorted({model.threshold for model in models}),
    }
    return {name: values for name, values in fitted.items() if len(values) > 1}


def _presets(table: Mapping[str, Any], source: str, check: Check) -> list[str]:
    """The presets that a table names; without names all that declare a space and can run."""
    if POLICY not in table:
        spaced = [name for name, preset in PRESETS.items() if preset.space is not None]
        return [name for name in spaced if refusal(check, PRESETS[name].policy) is None] or spaced
    names = table[POLICY]
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names:
        raise DsimError(f"{source}: policy is {quoted(names)}, expected a list of presets")
    for name in names:
        if not isinstance(name, str) or (name not in PRESETS and not is_file(name)):
            hint = did_you_mean(str(name), PRESETS)
            raise DsimError(f"{source}: no preset is named {quoted(name)}{hint}; there are {', '.join(PRESETS)}")
    return names


def _faults(world: World, preset: str, field: str, choices: Any, check: Check) -> list[tuple[Any, DsimError | None]]:
    """A field's values, and why the preset cannot run with each."""
    values = choices if isinstance(choices, list) else [choices]
    return [(value, refusal(_check_value, world, preset, field, value, check)) for value in values]


def _check_value(world: World, preset: str, field: str, value: Any, check: Check) -> None:
    code: AllowedCode = world.allow_code
    names = [*settings_of(preset_of(preset, allow_code=code).policy), REPLICAS]
    if field not in names:
        hint = did_you_mean(field, names)
        raise DsimError(f"[{preset}] has no field {quoted(field)}{hint}; its fields are {', '.join(names)}")
    if field != REPLICAS:
        check(parse(with_fields(preset, {field: value}), code))
    elif not (isinstance(value, int) and value > 0):
        raise DsimError(f"replicas is {quoted(value)}, expected a whole number of at least 1")


def searchable(profile: Profile, workload: str | None, requests: Trace | None = None) -> Check:
    """Whether a profile can price a policy, has the memory, also for the largest forward of these requests, and is of
    the same family of checkpoints."""

    def check(policy: Policy) -> None:
        setting = Setting(policy, profile, workload)
        _ = setting.check().limits
        if policy.family != profile.family:
            raise PolicyError(
                f"{policy.name} serves {policy.family} checkpoints, and profile {profile.name} is of a "
                f"{profile.family} one: expected a policy for the same checkpoint (dsim replay compares others)"
            )
        if requests is not None:
            check_fits(setting, requests)

    return check
