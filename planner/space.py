"""The fields that a search may vary, and the values of each."""

import dataclasses
import itertools
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..engine.allowed_code import AllowedCode
from ..engine.errors import CodeError, DsimError, PolicyError
from ..engine.jit import is_ours
from ..engine.outside import is_file
from ..engine.part import FITTED, Part, Preset
from ..engine.part import Choice as Words
from ..engine.part import Range as Bounds
from ..engine.policies import BASELINES
from ..engine.policy import PRESETS, Policy, name_of, parse, preset_of, settings_of
from ..files.read import did_you_mean, quoted, read_toml
from ..profiler.profile import Profile
from ..results.world import World
from ..sim.fleet import MAX_REPLICAS, PoolSpec
from ..sim.link import Link
from ..sim.memory import check_fits
from ..sim.setting import Setting
from ..traces import Trace
from .candidate import (
    DECIDER,
    LINK,
    LINK_FIELDS,
    POLICY,
    REPLICAS,
    Candidate,
    decoding_pools,
    fields_of,
    refusal,
    spelt,
    with_fields,
    world_at,
)
from .deploy import times_another
from .quality import Quality

DECIDERS = ("always", "uncached,tokens=512", "uncached,tokens=2048")
MOST_FLEETS = 1024  # numbers of replicas to choose from
Check = Callable[[Policy], object]  # DsimError if the policy cannot run
Judge = Callable[[Policy], Quality]
Refusals = dict[tuple[str, str], DsimError | None]  # of a field's value, as spelt; None: some part can run it


@dataclass(frozen=True)
class Choice:
    values: tuple[Any, ...]

    def probes(self) -> tuple[Any, ...]:
        """The values to check."""
        return self.values


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    step: float | None = None
    log: bool = False

    @property
    def whole(self) -> bool:
        return all(isinstance(v, int) for v in (self.low, self.high, self.step or 1))

    def probes(self) -> tuple[Any, ...]:
        return self.low, self.high


Dimension = Choice | Range


@dataclass(frozen=True)
class Space:
    """What varies of a world, by dotted name.

    Without pools: `policy`, and `PRESET.FIELD` (`PRESET.replicas`) of each preset. With pools: `POOL.FIELD`, `replicas`
    of all pools (1+3), `decider`, `link.FIELD`.
    """

    world: World
    dimensions: Mapping[str, Dimension]
    notes: tuple[str, ...] = ()

    @property
    def presets(self) -> tuple[str, ...]:
        """Empty for pools."""
        dimension = self.dimensions.get(POLICY)
        return dimension.values if isinstance(dimension, Choice) else ()

    def of(self, preset: str) -> dict[str, Dimension]:
        """The dimensions beside `policy` under a preset."""
        prefix = f"{preset}." if preset else ""
        return {name: d for name, d in self.dimensions.items() if name != POLICY and name.startswith(prefix)}

    def candidate(self, preset: str, values: Mapping[str, Any]) -> Candidate:
        """values: by the space's names; others are the preset's, or as given."""
        point = {self._field(preset, name): value for name, value in values.items()}
        if preset:
            point = {POLICY: preset, **point}
        return Candidate.at(self.world, point, {name: spelt(value) for name, value in values.items()})

    def values_of(self, candidate: Candidate) -> dict[str, Any]:
        """The candidate's values that the dimensions hold, by the space's names."""
        fields = fields_of(candidate.world)
        values: dict[str, Any] = {}
        for name, dimension in self.of(candidate.preset).items():
            text = spelt(fields[self._field(candidate.preset, name)])
            if isinstance(dimension, Choice):
                values.update((name, value) for value in dimension.values if spelt(value) == text)
            elif text.replace(".", "").isdigit() and dimension.low <= float(text) <= dimension.high:
                values[name] = int(text) if dimension.whole else float(text)
        return values

    def _field(self, preset: str, name: str) -> str:
        """A dimension's field of the world."""
        if not preset:
            return name
        of_preset = name.removeprefix(f"{preset}.")
        return of_preset if of_preset == REPLICAS else f"{POLICY}.{of_preset}"


@dataclass(frozen=True)
class _Part:
    """A preset or a pool, whose fields vary."""

    name: str
    spec: str  # the preset
    check: Check
    code: AllowedCode

    @cached_property
    def policy(self) -> Policy:
        return preset_of(self.spec, allow_code=self.code).policy

    @cached_property
    def fields(self) -> list[str]:
        """The fields with an effect, and `replicas`."""
        unmasking = dataclasses.fields(self.policy.unmasking) if self.policy.commits_by == "acceptance" else ()
        idle = {f.name for f in unmasking}
        return [*(name for name in settings_of(self.policy) if name not in idle), REPLICAS]

    def check_value(self, name: str, value: Any) -> None:
        """DsimError if the part cannot run with a field's value."""
        if name != REPLICAS:
            self.check(parse(with_fields(self.spec, {name: value}), self.code))
        elif not (isinstance(value, int) and value > 0):
            raise DsimError(f"replicas is {quoted(value)}, expected a whole number of at least 1")

    def vary(self, fields: Mapping[str, Any], source: str, refusals: "Refusals | None" = None) -> dict[str, Dimension]:
        """Dimensions by dotted name, without values that the part cannot run.

        refusals: collects the fate of each value; without it a refused value or an unknown field raises DsimError.
        """
        dimensions: dict[str, Dimension] = {}
        for name, values in fields.items():
            if name not in self.fields:
                if refusals is None:
                    raise _no_field(f"{source}: [{self.spec}] has no field", name, self.fields)
                continue
            dimension = dimension_of(name, values, source)
            faults = [(value, refusal(self.check_value, name, value)) for value in dimension.probes()]
            fitting = tuple(value for value, fault in faults if fault is None)
            for value, fault in faults:
                if refusals is None and fault is not None:
                    raise DsimError(f"{source}: {fault}")
                if refusals is not None:
                    refusals[name, spelt(value)] = fault and refusals.get((name, spelt(value)), fault)
            if isinstance(dimension, Choice) and fitting:
                dimensions[f"{self.name}.{name}"] = Choice(fitting)
            elif len(fitting) == len(faults):
                dimensions[f"{self.name}.{name}"] = dimension
        return dimensions


def space_of(
    world: World, table: Mapping[str, Any] | str | Path | None = None, *, also: Sequence[str] = (),
    gpus: int | None = None, by_cost: bool = False,
) -> Space:  # fmt: skip
    """The space of a table or TOML file; without one, values worth trying on any traffic (docs/tune.md).

    Without pools: `policy = [presets]`, fields for all of them, tables for single presets. With pools: a table for each
    pool, `decider`, `[link]`. also: presets that a default space includes. gpus: the pools' budget, by default their
    own. by_cost: include fleets that leave GPUs free. DsimError for unknown fields, for values that every preset
    refuses, and for a budget below the pools'.
    """
    source = "space" if isinstance(table, Mapping) else str(table or "the default space")
    content = table if table is None or isinstance(table, Mapping) else read_toml(table)
    if world.pools:
        return _of_pools(world, content, source, gpus, by_cost)
    if gpus is not None:
        raise DsimError(f"gpus is {gpus} and no pool is given, expected --pool, or replicas in a space file")
    return _of_presets(world, content, source, also)


def _default_table(world: World, check: Check, also: Sequence[str]) -> dict[str, Any]:
    """Presets of released engines, and of `also`, with their own spaces.

    An engine's preset is included if the step times are that engine's, or no engine's. Without one: all presets.
    """
    profile = world.loaded_profile()
    fitted = fitted_at(profile, world.workload)
    names = [name for name, p in PRESETS.items() if p.policy.family == profile.family and not times_another(profile, p)]
    if any(PRESETS[name].engine for name in names):
        names = [name for name in names if PRESETS[name].engine or name in also]
    names = [name for name in names if _own_space(PRESETS[name], fitted) is not None]
    # The latest full-sequence system first. A stored search's inputs contain the order.
    full = [name for name in names if PRESETS[name].policy.family == "full-sequence"]
    names = [name for name in names if name not in full] + full[::-1] + [name for name in also if name not in PRESETS]
    presets = {name: preset_of(name, allow_code=world.allow_code) for name in names}
    usable = {name: preset for name, preset in presets.items() if refusal(check, preset.policy) is None}
    if not usable:
        check(PRESETS[BASELINES[profile.family]].policy)
    return {POLICY: list(usable), **{name: _own_space(preset, fitted) or {} for name, preset in usable.items()}}


def fitted_at(profile: Profile, workload: str | None) -> dict[str, list[Any]]:
    """Block lengths and thresholds of the profile's yields, if there are several."""
    name = workload or (profile.commits[0].workload if profile.commits else "")
    models = [model for model in profile.commits if model.workload == name]
    fitted: dict[str, list[Any]] = {
        "block_length": sorted({model.block_length for model in models if model.extrapolated_from is None}),
        "threshold": sorted({model.threshold for model in models}),
    }
    return {name: values for name, values in fitted.items() if len(values) > 1}


def _of_presets(world: World, table: Mapping[str, Any] | None, source: str, also: Sequence[str]) -> Space:
    check = searchable(world.loaded_profile(), world.workload)
    is_default = table is None
    table = _default_table(world, check, also) if table is None else table
    names = _presets(table, source, check)
    tables = {
        name: value for name, value in table.items()
        # `[chunk]` is the preset, `chunk = ...` the field.
        if (name in PRESETS or is_file(name)) and isinstance(value, Mapping) and not {"low", "high"} & set(value)
    }  # fmt: skip
    shared = {name: value for name, value in table.items() if name not in tables and name != POLICY}
    for name in tables:
        if name not in names:
            raise DsimError(f"{source}: [{name}] is given, and policy is {', '.join(names)}: expected it among them")
    dimensions: dict[str, Dimension] = {POLICY: Choice(tuple(names))}
    refusals: Refusals = {}
    known_fields: dict[str, None] = {}
    for name in names:
        part = _Part(name, name, check, world.allow_code)
        try:
            check(part.policy)
        except DsimError as error:
            place = source if isinstance(error, CodeError) else f"{source}: {name}"
            raise type(error)(f"{place}: {error}") from None
        fields = tables.get(name)
        if fields is None and name not in PRESETS:  # it declares its values
            fields = _own_space(preset_of(name, allow_code=part.code), {})
        fields = fields or {}
        dimensions |= part.vary({n: v for n, v in shared.items() if n not in fields}, source, refusals)
        dimensions |= part.vary(fields, source, {} if is_default else None)
        known_fields |= dict.fromkeys(part.fields)
    for name in shared:
        if name not in known_fields:
            raise _no_field(f"{source}: there is no field", name, list(known_fields))
    for fault in filter(None, refusals.values()):
        raise DsimError(f"{source}: {fault}")
    return Space(world, dimensions)


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


def _of_pools(world: World, table: Mapping[str, Any] | None, source: str, gpus: int | None, by_cost: bool) -> Space:
    own_gpus = world.num_gpus
    if gpus is not None and gpus < own_gpus:
        raise DsimError(f"gpus is {gpus} and the pools as given have {own_gpus}, expected at least as many")
    specs = PoolSpec.parse_all(world.pools)
    names = [spec.name for spec in specs] + ([DECIDER, LINK] if world.links else [])
    for name in table or ():
        if name not in names:
            hint = did_you_mean(name, names)
            raise DsimError(f"{source}: there is no {quoted(name)}{hint}, expected {', '.join(names)}")
    dimensions: dict[str, Dimension] = {}
    counts: list[Sequence[int]] = []
    gpus_of_replicas: list[int] = []
    for spec, setting in world.each_pool():
        if spec.name in (DECIDER, LINK, REPLICAS):
            raise DsimError(f"pool {spec.name} has the name of a part of the space, expected another one")
        check = searchable(setting.profile, world.workload)
        part = _Part(spec.name, name_of(spec.policy), check, world.allow_code)
        fields = _worth_moving(world, part, setting) if table is None else _section(table, spec.name, source)
        counts.append(_counts(fields.pop(REPLICAS), f"{source}: {spec.name}") if REPLICAS in fields else ())
        gpus_of_replicas.append(setting.profile.device.count)
        dimensions |= part.vary(fields, f"{source}: pool {spec.name}", {} if table is None else None)
    if world.links:
        deciders = list(dict.fromkeys([world.decider, *DECIDERS]))
        dimensions |= _of_links(world, {DECIDER: deciders} if table is None else table, source)
    has_counts = any(counts)
    if table is None or gpus is not None or has_counts:
        budget = gpus if gpus is not None or has_counts else own_gpus
        if has_counts:
            counts = [few or [spec.count] for spec, few in zip(specs, counts, strict=True)]
        else:
            counts = [range(1, max(2, (budget or 0) // size + 1)) for size in gpus_of_replicas]
        dimensions[REPLICAS] = Choice(_fleets(counts, gpus_of_replicas, budget, by_cost or has_counts))
    world.fleet().check()
    return Space(world, dimensions)


def _worth_moving(world: World, part: _Part, setting: Setting) -> dict[str, Any]:
    """A pool's fields worth trying: linked pools share a block length, and only batching matters to a prefill."""
    fields = _own_space(preset_of(part.spec, allow_code=part.code), fitted_at(setting.profile, world.workload)) or {}
    if world.links:
        fields.pop("block_length", None)
    if part.name in [pool.name for pool in decoding_pools(world)]:
        return fields
    parts: tuple[Any, ...] = (setting.policy.batching, setting.policy.memory)
    of_prefills = {f.name for axis in parts for f in dataclasses.fields(axis)}
    return {name: values for name, values in fields.items() if name in of_prefills}


def _of_links(world: World, table: Mapping[str, Any], source: str) -> dict[str, Dimension]:
    dimensions: dict[str, Dimension] = {}
    if DECIDER in table:
        dimensions[DECIDER] = dimension_of(DECIDER, table[DECIDER], source)
    for name, value in _section(table, LINK, source).items():
        if name not in LINK_FIELDS:
            raise _no_field(f"{source}: [{LINK}] has no field", name, LINK_FIELDS)
        dimensions[f"{LINK}.{name}"] = dimension = dimension_of(name, value, source)
        for probe in dimension.probes():
            try:
                Link.parse(world_at(world, {f"{LINK}.{name}": probe}).links[0])
            except PolicyError as error:
                raise PolicyError(f"{source}: {error}") from None
    return dimensions


def _section(table: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    section = table.get(name, {})
    if not isinstance(section, Mapping):
        raise DsimError(f"{source}: {name} is {quoted(section)}, expected a table of fields")
    return dict(section)


def _counts(values: Any, source: str) -> Sequence[int]:
    dimension = dimension_of(REPLICAS, values, source)
    counts: Sequence[Any] = dimension.probes()
    if isinstance(dimension, Range) and dimension.whole:
        counts = range(int(dimension.low), min(int(dimension.high), MAX_REPLICAS) + 1)
    if any(type(n) is not int or not 1 <= n <= MAX_REPLICAS for n in counts):
        raise DsimError(f"{source}.{REPLICAS} is {quoted(values)}, expected whole numbers of at least 1")
    return counts


def _fleets(counts: Sequence[Sequence[int]], gpus: Sequence[int], budget: int | None, small: bool) -> tuple[str, ...]:
    """Numbers of replicas (1+3) within the budget; small: also those that leave GPUs for another replica."""
    if budget is not None and budget > MAX_REPLICAS:
        raise DsimError(f"gpus is {budget}, expected at most {MAX_REPLICAS}")
    fleets: list[str] = []
    for fleet in itertools.product(*counts):
        used = sum(n * size for n, size in zip(fleet, gpus, strict=True))
        if budget is not None and (used > budget or (not small and used + min(gpus) <= budget)):
            continue
        fleets.append("+".join(map(str, fleet)))
        if len(fleets) > MOST_FLEETS:
            raise DsimError(
                f"gpus is {budget} and allows more than {MOST_FLEETS} numbers of replicas, expected fewer: name them "
                "in a space file"
            )
    if not fleets:
        raise DsimError(f"no numbers of replicas of the space fit {budget} GPUs, expected some that do")
    return tuple(fleets)


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


def guarded(space: Space, judge: Judge, minimum: float) -> Space:
    """Without presets and values below the minimum quality, or of unknown quality."""

    def excluded(policy: Policy) -> str:
        shortfall = judge(policy).shortfall(minimum)
        return shortfall and f"its quality is {shortfall}"

    code = space.world.allow_code
    notes: list[str] = []
    presets: list[str] = []
    dimensions: dict[str, Dimension] = {}
    for preset in space.presets:
        base = preset_of(preset, allow_code=code).policy
        if reason := excluded(base):
            notes.append(f"{preset} is left out: {reason}")
            continue
        presets.append(preset)
        for dotted, dimension in space.of(preset).items():
            name = dotted.removeprefix(f"{preset}.")
            if name in base.neutral or name == REPLICAS:
                dimensions[dotted] = dimension
                continue
            reasons = {v: excluded(parse(with_fields(preset, {name: v}), code)) for v in dimension.probes()}
            bad = {value: reason for value, reason in reasons.items() if reason}
            if isinstance(dimension, Choice) and len(bad) < len(reasons):
                dimensions[dotted] = Choice(tuple(v for v in dimension.values if v not in bad))
            elif isinstance(dimension, Range) and not any("unknown" in reason for reason in bad.values()):
                dimensions[dotted] = dimension  # lower qualities are refused one by one
            if bad:
                values, reason = ", ".join(map(spelt, bad)), next(iter(bad.values()))
                notes.append(f"{preset}: {name} does not move to {values}: {reason}")
    if not presets:
        raise DsimError(
            f"no policy of the space is known to keep {100 * minimum:g} % of the quality: {notes[0]}; "
            "add a preset, or a --quality-table"
        )
    return Space(space.world, {POLICY: Choice(tuple(presets)), **dimensions}, tuple(notes))


def dimension_of(name: str, value: Any, place: str) -> Dimension:
    """From plain values; DsimError if they are invalid."""
    values = [value] if isinstance(value, str | int | float) else value
    if isinstance(values, list) and values:
        words = ["/".join(map(str, v)) if isinstance(v, list) else v for v in values]
        if all(isinstance(word, str | int | float) for word in words):
            return Choice(tuple({spelt(word): word for word in words}.values()))
    if isinstance(values, Mapping) and {"low", "high"} <= set(values) <= {"low", "high", "step", "log"}:
        numbers = [values[key] for key in ("low", "high", "step") if key in values]
        log = values.get("log", False)
        if all(type(v) in (int, float) and math.isfinite(v) for v in numbers) and isinstance(log, bool):
            is_scale = not log or ("step" not in values and values["low"] > 0)
            if values["low"] < values["high"] and values.get("step", 1) > 0 and is_scale:
                return Range(values["low"], values["high"], values.get("step"), log)
    raise DsimError(
        f"{place}: {name} is {quoted(value)}, expected values, or numbers low and high, with a step above 0 or, from a "
        "low above 0, log = true"
    )


def _own_space(preset: Preset, fitted: Mapping[str, Any]) -> dict[str, Any] | None:
    """None if neither the preset nor its parts from outside declare values."""
    table: dict[str, Any] = {}
    if preset.space is None:
        for part in preset.policy.parts():
            table |= _declared(part, preset.policy)
        return table or None
    for name, value in preset.space.items():
        table |= fitted if name == FITTED else {name: value}
    return table


def _declared(part: Part, policy: Policy) -> dict[str, Any]:
    """What an outside part declares: closed ranges, words, true or false."""
    table: dict[str, Any] = {}
    if is_ours(type(part)):
        return table
    hints = typing.get_type_hints(type(part), include_extras=True)
    for f in dataclasses.fields(part):  # type: ignore[arg-type]
        kind, *notes = typing.get_args(hints[f.name]) or (hints[f.name],)
        for note in notes:
            if isinstance(note, Bounds) and note.low is not None and note.high is not None:
                high = min(note.high, policy.block_length) if f.name == policy.granularity.sized_by_block else note.high
                ends = {"low": note.low, "high": high}
                table[f.name] = {name: float(end) for name, end in ends.items()} if kind is float else ends
            elif isinstance(note, Words):
                table[f.name] = list(note.words)
        if kind is bool:
            table[f.name] = [False, True]
    table.pop("block_length", None)  # from the profile's commit models
    return table


def _no_field(problem: str, name: str, fields: Sequence[str]) -> DsimError:
    return DsimError(f"{problem} {quoted(name)}{did_you_mean(name, fields)}; its fields are {', '.join(fields)}")
