"""The settings that a search may choose: the values of each field, by preset."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.errors import CodeError, DsimError, PolicyError
from ..engine.jit import is_ours
from ..engine.outside import is_file
from ..engine.part import FITTED, Part, Preset
from ..engine.part import Choice as Words
from ..engine.part import Range as Bounds
from ..engine.policies import BASELINES
from ..engine.policy import PRESETS, Policy, name_of, parse, preset_of, settings_of, to_toml
from ..files.read import did_you_mean, quoted, read_toml
from ..profiler.profile import Profile
from ..results.scenario import Scenario
from ..sim.memory import check_fits
from ..sim.setting import Setting
from ..traces import Trace
from .deploy import times_another
from .quality import Quality

REPLICAS = "replicas"  # the only dimension that is no field
# Tried by default.
DEFAULT_PRESETS = tuple(
    name for name, p in PRESETS.items() if p.space is not None and p.policy.family == "block-diffusion"
)

Check = Callable[[Policy], object]  # DsimError if the policy cannot run
Judge = Callable[[Policy], Quality]


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
class Candidate:
    """A preset, the fields in which it differs, and the replicas."""

    preset: str
    settings: tuple[tuple[str, str], ...] = ()
    replicas: int = 1
    allow_code: AllowedCode = field(default=NO_CODE, repr=False, compare=False)
    file: ClassVar[str] = "policy.toml"  # holds `toml`

    @property
    def spec(self) -> str:
        return ",".join([self.preset, *(f"{name}={value}" for name, value in self.settings)])

    @property
    def policy(self) -> Policy:
        """PolicyError for contradictory fields."""
        return parse(self.spec, self.allow_code)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Those that decide the answers."""
        return (self.policy,)

    @property
    def untested(self) -> tuple[str, ...]:
        """See `beyond_tested`."""
        return beyond_tested(self.spec, self.allow_code)

    @property
    def columns(self) -> dict[str, str]:
        """Chosen values, by name."""
        return {f"{self.preset}.{name}": value for name, value in self.settings}

    @property
    def arguments(self) -> tuple[str, ...]:
        """Options of `dsim replay`."""
        return ("--policy", self.spec, *(("--replicas", str(self.replicas)) if self.replicas > 1 else ()))

    def posed(self, scenario: Scenario) -> Scenario:
        return replace(scenario, policy=self.spec, replicas=self.replicas)

    def to_json(self) -> dict[str, Any]:
        return {"policy": self.spec, "replicas": self.replicas}

    def toml(self) -> str:
        """A policy file."""
        return f"{to_toml(self.policy, self.preset, self.allow_code)}replicas = {self.replicas}\n"

    def __str__(self) -> str:
        return self.spec if self.replicas == 1 else f"{self.spec} on {self.replicas} replicas"


@dataclass(frozen=True)
class Space:
    """The values that each preset's fields may take."""

    dimensions: Mapping[str, Mapping[str, Dimension]]  # by preset, by field
    notes: tuple[str, ...] = ()
    allow_code: AllowedCode = field(default=NO_CODE, repr=False)

    def candidate(self, preset: str, values: Mapping[str, Any], replicas: int = 1) -> Candidate:
        given = {name: spelt(value) for name, value in values.items() if name != REPLICAS}
        spec = ",".join([preset, *(f"{n}={v}" for n, v in given.items())])
        return candidate_of(spec, values.get(REPLICAS, replicas), self.allow_code)

    def values_of(self, candidate: Candidate) -> dict[str, Any]:
        """The candidate's values, where the dimensions hold them."""
        fields = {
            **settings_of(preset_of(candidate.preset, allow_code=self.allow_code).policy),
            **dict(candidate.settings),
            REPLICAS: candidate.replicas,
        }
        return held(self.dimensions[candidate.preset], fields)

    def to_json(self) -> dict[str, Any]:
        return {
            preset: {name: dataclasses.asdict(dimension) for name, dimension in fields.items()}
            for preset, fields in self.dimensions.items()
        }


def held(dimensions: Mapping[str, Dimension], fields: Mapping[str, Any]) -> dict[str, Any]:
    """By name, the fields' values that dimensions hold."""
    values: dict[str, Any] = {}
    for name, dimension in dimensions.items():
        text = spelt(fields[name])
        if isinstance(dimension, Choice):
            values.update((name, v) for v in dimension.values if spelt(v) == text)
        elif text.replace(".", "").isdigit() and dimension.low <= float(text) <= dimension.high:
            values[name] = int(text) if dimension.whole else float(text)
    return values


def candidate_of(spec: str, replicas: int = 1, allow_code: AllowedCode = NO_CODE) -> Candidate:
    """Of a SPEC or TOML file; an invalid one keeps its fields as written."""
    preset = name_of(spec)
    base = settings_of(preset_of(preset, spec, allow_code).policy)
    try:
        policy = parse(spec, allow_code)
    except PolicyError:
        if spec.split(",")[0] != preset:  # a TOML file, or an invalid main field
            raise
        pairs = (item.partition("=") for item in spec.split(",")[1:])
        return Candidate(preset, tuple((name, value) for name, _, value in pairs), replicas, allow_code)
    changed = tuple((n, spelt(v)) for n, v in settings_of(policy).items() if v != base[n])
    return Candidate(preset, changed, replicas, allow_code)


def beyond_tested(spec: str, allow_code: AllowedCode = NO_CODE) -> tuple[str, ...]:
    """The fields of a SPEC above what its engine's makers tested, in words."""
    preset = preset_of(name_of(spec), spec, allow_code)
    values = settings_of(parse(spec, allow_code)) if preset.tested else {}
    return tuple(
        f"{name}={values[name]} is beyond {largest}, the most that its engine is tested with ({source})"
        for name, (largest, source) in preset.tested.items()
        if values[name] is None or values[name] > largest
    )


def default_space(
    profile: Profile, workload: str | None, also: Sequence[str] = (), allow_code: AllowedCode = NO_CODE
) -> Space:
    """Settings worth trying on any traffic that the profile can run, of presets of released engines and of `also`.

    An engine's preset is included if the step times are that engine's, or no engine's. Without one: all presets.
    """
    moved = fitted_at(profile, workload)
    ours = [name for name, p in PRESETS.items() if p.policy.family == profile.family and not times_another(profile, p)]
    if any(PRESETS[name].engine for name in ours):
        ours = [name for name in ours if PRESETS[name].engine or name in also]
    spaces = {name: space for name in ours if (space := _own_space(PRESETS[name], moved)) is not None}
    # The latest full-sequence system first. A stored search's inputs contain the order.
    full = [preset for preset in spaces if PRESETS[preset].policy.family == "full-sequence"]
    table = {p: spaces[p] for p in (*(p for p in spaces if p not in full), *reversed(full))}
    outside = {name: preset_of(name, allow_code=allow_code) for name in also if name not in PRESETS}
    table |= {name: _own_space(preset, moved) or {} for name, preset in outside.items()}
    check, found = searchable(profile, workload), PRESETS | outside
    able = {
        preset: _fitting_fields(preset, fields, check, allow_code)
        for preset, fields in table.items()
        if _refusal(check, found[preset].policy) is None
    }
    if not able:
        check(PRESETS[BASELINES[profile.family]].policy)
    return space_of({"policy": list(able), **able}, "the default space", check, allow_code)


def fitted_at(profile: Profile, workload: str | None) -> dict[str, list[Any]]:
    """Block lengths and thresholds of the profile's yields, if there are several."""
    name = workload or (profile.commits[0].workload if profile.commits else "")
    held = [m for m in profile.commits if m.workload == name]
    fitted: dict[str, list[Any]] = {
        "block_length": sorted({m.block_length for m in held if m.extrapolated_from is None}),
        "threshold": sorted({m.threshold for m in held}),
    }
    return {name: values for name, values in fitted.items() if len(values) > 1}


def fields_to_move(
    preset: str, profile: Profile, workload: str | None, check: Check, allow_code: AllowedCode = NO_CODE
) -> dict[str, Any]:
    """A preset's fields worth trying that the profile can run."""
    own = _own_space(preset_of(preset, allow_code=allow_code), fitted_at(profile, workload)) or {}
    return _fitting_fields(preset, own, check, allow_code)


def _fitting_fields(preset: str, fields: Mapping[str, Any], check: Check, allow_code: AllowedCode) -> dict[str, Any]:
    return {name: _fitting(preset, name, value, check, allow_code) for name, value in fields.items()}


def _fitting(preset: str, name: str, value: Any, check: Check, allow_code: AllowedCode) -> Any:
    """The values that the profile can run."""
    if not isinstance(value, list):
        return value
    refused = _refused(preset, name, Choice(tuple(value)), check, allow_code)
    return [v for v in value if v not in refused] or value


def load_space(path: str | Path, check: Check, allow_code: AllowedCode = NO_CODE) -> Space:
    """From a TOML file: `policy = [presets]`, fields for all of them, tables for single presets.

    allow_code: files that presets may come from.
    """
    return space_of(read_toml(path), str(path), check, allow_code)


def space_of(table: Mapping[str, Any], where: str, check: Check, allow_code: AllowedCode = NO_CODE) -> Space:
    """DsimError for unknown fields, and for values that every preset refuses."""
    if "policy" in table:
        presets = table["policy"]
    else:
        spaced = [name for name, preset in PRESETS.items() if preset.space is not None]
        presets = [name for name in spaced if _refusal(check, PRESETS[name].policy) is None] or spaced
    presets = [presets] if isinstance(presets, str) else presets
    if not isinstance(presets, list) or not presets:
        raise DsimError(
            f"{where}: policy is {quoted(presets)}, expected a list of presets such as {list(DEFAULT_PRESETS)}"
        )
    for name in presets:
        if not isinstance(name, str) or (name not in PRESETS and not is_file(name)):
            hint = did_you_mean(str(name), PRESETS)
            raise DsimError(f"{where}: no preset is named {quoted(name)}{hint}; there are {', '.join(PRESETS)}")
    try:
        found = {name: preset_of(name, allow_code=allow_code) for name in presets}
    except CodeError as error:
        raise CodeError(f"{where}: {error}") from None
    # `[chunk]` is the preset, `chunk = ...` the field.
    own = {
        name: v
        for name, v in table.items()
        if (name in PRESETS or is_file(name)) and isinstance(v, dict) and not {"low", "high"} & set(v)
    }
    shared = {name: value for name, value in table.items() if name not in own and name != "policy"}
    for name in presets:
        if name not in PRESETS and name not in own:  # it declares its values
            own[name] = _own_space(found[name], {}) or {}
    unused = [name for name in own if name not in presets]
    if unused:
        raise DsimError(f"{where}: [{unused[0]}] is given, and policy is {', '.join(presets)}: expected it among them")
    dimensions: dict[str, dict[str, Dimension]] = {}
    refusals: dict[tuple[str, Any], DsimError] = {}
    accepted: set[tuple[str, Any]] = set()
    for preset in presets:
        try:
            check(found[preset].policy)
        except DsimError as error:
            raise type(error)(f"{where}: {preset}: {error}") from None
        fields = _fields(found[preset].policy)
        for name in own.get(preset, {}):
            if name not in fields and name != REPLICAS:
                said = f"{quoted(name)}{did_you_mean(name, fields)}; {_listed(fields)}"
                raise DsimError(f"{where}: [{preset}] has no field {said}")
        mine: dict[str, Dimension] = {}
        for name, value in {**shared, **own.get(preset, {})}.items():
            if name not in fields and name != REPLICAS:
                continue
            dimension = dimension_of(name, value, where)
            refused = _refused(preset, name, dimension, check, allow_code)
            # Some presets may refuse a shared value; a value in a preset's table must fit.
            whose = preset if name in own.get(preset, {}) else ""
            refusals |= {(whose + name, value): error for value, error in refused.items()}
            accepted |= {(whose + name, value) for value in dimension.probes() if value not in refused}
            if isinstance(dimension, Choice):
                left = tuple(v for v in dimension.values if v not in refused)
                if left:
                    mine[name] = Choice(left)
            elif not refused:
                mine[name] = dimension
        dimensions[preset] = mine
    fields = dict.fromkeys(f for preset in presets for f in _fields(found[preset].policy))
    for name in shared:
        if name not in fields and name != REPLICAS:
            raise DsimError(f"{where}: there is no field {quoted(name)}{did_you_mean(name, fields)}; {_listed(fields)}")
    for asked, refusal in refusals.items():
        if asked not in accepted:
            raise DsimError(f"{where}: {refusal}")
    return Space(dimensions, allow_code=allow_code)


def runs_on(profile: Profile, workload: str | None) -> Check:
    """Whether a profile can price a policy and has the memory."""

    def check(policy: Policy) -> None:
        _ = Setting(policy, profile, workload).check().limits

    return check


def searchable(profile: Profile, workload: str | None, requests: Trace | None = None) -> Check:
    """`runs_on`, the same family of checkpoints, and room for the largest forward of these requests."""
    runs = runs_on(profile, workload)

    def check(policy: Policy) -> None:
        runs(policy)
        if policy.family != profile.family:
            raise PolicyError(
                f"{policy.name} serves {policy.family} checkpoints, and profile {profile.name} is of a "
                f"{profile.family} one: expected a policy for the same checkpoint (dsim replay compares others)"
            )
        if requests is not None:
            check_fits(Setting(policy, profile, workload), requests)

    return check


def guarded(space: Space, judge: Judge, minimum: float) -> Space:
    """Without settings below the minimum quality, or of unknown quality."""

    def excluded(policy: Policy) -> str | None:
        quality = judge(policy)
        if quality.relative is None:
            return f"its quality is unknown: {quality.notes[0]}"
        below = quality.relative < minimum
        return f"its quality is {quality}, expected at least {100 * minimum:g} %" if below else None

    notes: list[str] = []
    dimensions: dict[str, dict[str, Dimension]] = {}
    for preset, fields in space.dimensions.items():
        base = preset_of(preset, allow_code=space.allow_code).policy
        if reason := excluded(base):
            notes.append(f"{preset} is left out: {reason}")
            continue
        dimensions[preset] = {}
        for name, dimension in fields.items():
            if name in base.neutral or name == REPLICAS:
                dimensions[preset][name] = dimension
                continue
            reasons = {value: excluded(space.candidate(preset, {name: value}).policy) for value in dimension.probes()}
            bad = {value: reason for value, reason in reasons.items() if reason}
            if isinstance(dimension, Choice) and len(bad) < len(reasons):
                dimensions[preset][name] = Choice(tuple(v for v in dimension.values if v not in bad))
            elif isinstance(dimension, Range) and not any("unknown" in reason for reason in bad.values()):
                dimensions[preset][name] = dimension  # lower qualities are refused one by one
            if bad and preset in dimensions:
                reason = next(iter(bad.values()))
                notes.append(f"{preset}: {name} does not move to {', '.join(spelt(v) for v in bad)}: {reason}")
    if not dimensions:
        raise DsimError(
            f"no policy of the space is known to keep {100 * minimum:g} % of the quality: {notes[0]}; "
            "add a preset, or a --quality-table"
        )
    return Space(dimensions, tuple(notes), space.allow_code)


def _fields(policy: Policy) -> dict[str, Any]:
    """The fields with an effect."""
    idle = {f.name for f in dataclasses.fields(policy.unmasking)} if policy.commits_by == "acceptance" else set()
    return {name: value for name, value in settings_of(policy).items() if name not in idle}


def _refused(
    preset: str, name: str, dimension: Dimension, check: Check, allow_code: AllowedCode
) -> dict[Any, DsimError]:
    """The probed values that the preset refuses, with errors."""
    refused: dict[Any, DsimError] = {}
    for value in dimension.probes():
        if name == REPLICAS:
            if not isinstance(value, int) or value < 1:
                refused[value] = DsimError(f"replicas is {quoted(value)}, expected a whole number of at least 1")
            continue
        try:
            check(parse(f"{preset},{name}={spelt(value)}", allow_code))
        except DsimError as error:
            refused[value] = error
    return refused


def dimension_of(name: str, value: Any, where: str) -> Dimension:
    """From plain values; DsimError if they are invalid."""
    if isinstance(value, list):
        values = tuple("/".join(map(str, v)) if isinstance(v, list) else v for v in value)
        if not values or not all(isinstance(v, str | int | float) for v in values):
            raise DsimError(f"{where}: {name} is {quoted(value)}, expected a list of values")
        return Choice(tuple({spelt(v): v for v in values}.values()))
    if isinstance(value, dict):
        strange = set(value) - {"low", "high", "step", "log"}
        if strange or not {"low", "high"} <= set(value):
            raise DsimError(
                f"{where}: {name} has {', '.join(sorted(value)) or 'nothing'}, expected low, high, and step or log"
            )
        numbers = [value[k] for k in ("low", "high", "step") if k in value]
        good = all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in numbers)
        log = value.get("log", False)
        if not good or not isinstance(log, bool) or value.get("step", 1) <= 0 or not value["low"] < value["high"]:
            raise DsimError(
                f"{where}: {name} is {quoted(value)}, expected numbers with low below high and a step above 0"
            )
        if log and ("step" in value or value["low"] <= 0):
            raise DsimError(f"{where}: {name} is {quoted(value)}: expected a low above 0 and no step with log")
        return Range(value["low"], value["high"], value.get("step"), log)
    if isinstance(value, str | int | float):
        return Choice((value,))
    raise DsimError(f"{where}: {name} is {quoted(value)}, expected a list, or low and high")


def _own_space(preset: Preset, fitted: Mapping[str, Any]) -> dict[str, Any] | None:
    """None if neither the preset nor its parts from outside declare values."""
    if preset.space is None:
        declared: dict[str, Any] = {}
        for part in preset.policy.parts():
            declared |= _declared(part, preset.policy)
        return declared or None
    table: dict[str, Any] = {}
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
                most = min(note.high, policy.block_length) if f.name == policy.granularity.sized_by_block else note.high
                table[f.name] = (
                    {"low": float(note.low), "high": float(most)} if kind is float else {"low": note.low, "high": most}
                )
            elif isinstance(note, Words):
                table[f.name] = list(note.words)
        if kind is bool:
            table[f.name] = [False, True]
    table.pop("block_length", None)  # from the profile's commit models
    return table


def _refusal(check: Check, policy: Policy) -> DsimError | None:
    try:
        check(policy)
    except DsimError as error:
        return error
    return None


def spelt(value: Any) -> str:
    """As in a SPEC."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(fields: Mapping[str, Any]) -> str:
    return f"its fields are {', '.join(fields)} and {REPLICAS}"
