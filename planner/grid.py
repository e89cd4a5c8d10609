"""Read a sweep's configuration into checked cells."""

import itertools
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.engine import EMIT
from ..engine.errors import DsimError
from ..engine.plain import plain
from ..engine.policy import PRESETS, settings_of, with_file
from ..files.read import cut, did_you_mean, quoted, read_toml
from ..files.schema import FileObject
from ..profiler.placed import placed
from ..profiler.profile import Profile
from ..results.fleet_file import FleetWords
from ..results.scenario import Scenario, on_fleet
from ..results.slo import Slo
from ..traces.lengths import without_limit
from .contents import Json, asked_of, digest
from .fleet_space import with_parts
from .space import spelt

MOST_CELLS = 100_000  # all are checked, stored and drawn
POLICY = "policy."  # of `policy.chunk`, a field of the SPEC
NOT_VARIED = ("allow_code", "check_rules", "pools", "links", "decider")
# How requests are served; which requests, apart from the seed, and their SLOs' classes.
OF_SERVICE = (
    "policy", "profile", "workload", "yields", "frontend", "replicas", "router", "pools", "links",
    "decider", "scaler", "startup",
)  # fmt: skip
OF_REQUESTS = (
    "trace", "arrival", "rate", "lengths", "concurrency", "num_requests", "time_scale",
    "time_unit", "skip_bad", "columns", "only", "slos",
)  # fmt: skip
FILES = ("trace", "profile", "yields", "lengths")  # may name a file
FLEET = "fleet"  # a file that sets several fields
TYPES: dict[str, Any] = {n: kind for n, kind in typing.get_type_hints(Scenario).items() if n not in NOT_VARIED}
TYPES[FLEET] = str | None


@dataclass(frozen=True)
class Cell:
    key: str  # of scenario, trace, profile, policy file, dsim's version
    varied: Mapping[str, Any]  # in the table's order
    scenario: Scenario


@dataclass(frozen=True)
class Plan:
    """A checked configuration; cells in table order."""

    title: str
    varied: tuple[str, ...]
    cells: tuple[Cell, ...]
    config: Json  # as given
    estimated: tuple[str, ...]  # profiles not measured
    implementations: tuple[str, ...]  # that price the cells


def read_plan(config: str | Path | Mapping[str, Any], allow_code: AllowedCode = NO_CODE) -> Plan:
    """The cells; DsimError names the first invalid field or value. allow_code: files that policies may name."""
    if isinstance(config, Mapping):
        where, folder, data = "config", Path.cwd(), dict(config)
    else:
        where, folder, data = str(config), Path(config).absolute().parent, read_toml(config)
    title = "sweep" if isinstance(config, Mapping) else Path(config).stem
    whole = FileObject(where, "", data, (), optional={"title": title, "base": {}, "grid": {}, "list": []})
    base = {
        name: value_of(f"{where}: base.{name}", name, value) for name, value in _flat(whole.section("base")).items()
    }
    grid: dict[str, list[Any]] = {}
    for name, values in _flat(whole.section("grid")).items():
        place = f"{where}: grid.{name}"
        if not isinstance(values, list):
            raise DsimError(f"{place} is {quoted(values)}, expected a list of values; a single one belongs in [base]")
        if not values:
            raise DsimError(f"{place} is an empty list, expected at least one value")
        grid[name] = [value_of(place, name, value) for value in values]
    picked = [
        {name: value_of(f"{where}: list {i}, {name}", name, value) for name, value in _flat(item).items()}
        for i, item in enumerate(whole.sections("list"), 1)
    ]
    if not grid and not picked:
        raise DsimError(f"{where}: there is nothing to vary, expected fields in [grid] or cells in [[list]]")
    num_cells = math.prod(map(len, grid.values())) + len(picked)
    if num_cells > MOST_CELLS:
        raise DsimError(f"{where}: asks for {num_cells} cells, expected at most {MOST_CELLS}")
    combined = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []
    varied = tuple(dict.fromkeys([*grid, *(name for item in picked for name in item)]))
    every = [base | item for item in [*combined, *picked]]
    return _check(where, folder, whole.text("title"), varied, every, data, allow_code)


def key_of(scenario: Scenario) -> str:
    return digest(asked_of(scenario))[:24]


def _flat(table: FileObject) -> Json:
    """`policy.chunk = 4` without quotes is a TOML table, as is `decode.chunk = 4`."""
    flat: Json = {}
    for name, value in table.values.items():
        if isinstance(value, Mapping) and (name == "policy" or name not in TYPES):
            flat |= {f"{name}.{field}": setting for field, setting in value.items()}
        else:
            flat[name] = value
    return flat


def value_of(place: str, name: str, value: Any) -> Any:
    """In the field's type."""
    if name.startswith(POLICY) or _of_a_pool(name):
        return _policy_value(place, value)
    if name not in TYPES:
        settings = {field for preset in PRESETS.values() for field in settings_of(preset.policy)}
        hint = f" (did you mean {POLICY}{name}?)" if name in settings else did_you_mean(name, TYPES)
        raise DsimError(f"{place}: there is no field {quoted(name)}{hint}; there are {', '.join(TYPES)} and policy.*")
    kind = TYPES[name]
    if isinstance(kind, types.UnionType):
        if value == "none":
            return None
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        kind = str if str in kinds and isinstance(value, str) else kinds[0]
    kind = typing.get_origin(kind) or kind
    if kind is tuple and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        try:
            return tuple(str(Slo.parse(item)) for item in value)
        except DsimError as error:
            raise DsimError(f"{place}: {error}") from None
    try:
        if kind is tuple:
            raise ValueError("a list of SLOs")
        return plain(value, kind)
    except ValueError as error:
        raise DsimError(f"{place} is {quoted(value)}, expected {error}") from None


def _policy_value(place: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return "/".join(str(item) for item in value)
    if not isinstance(value, bool | int | float | str) or (isinstance(value, str) and "," in value):
        raise DsimError(f"{place} is {quoted(value)}, expected a number, true or false, a word, or a list of numbers")
    return value


def _check(
    where: str, folder: Path, title: str, varied: tuple[str, ...], combined: Sequence[Json], config: Json,
    allow_code: AllowedCode,
) -> Plan:  # fmt: skip
    """Check every cell before any runs."""
    cells: dict[str, Cell] = {}
    known: dict[Any, tuple[Profile, Json]] = {}  # by OF_SERVICE: profile, policy's settings
    prepared: set[Any] = set()  # checked values of OF_REQUESTS
    estimated: dict[str, None] = {}
    implementations: dict[str, None] = {}
    for i, given in enumerate(combined, 1):
        try:
            scenario = scenario_of(folder, given, allow_code)
            served = tuple(getattr(scenario, name) for name in OF_SERVICE)
            if served not in known:
                policy = scenario.parsed_policy()
                known[served] = scenario.loaded_profile(), settings_of(policy)
                for _, setting in scenario.each_pool():
                    setting.check()
            profile, settings = known[served]
            check_values(scenario)
            asked = tuple(getattr(scenario, name) for name in OF_REQUESTS)
            if asked not in prepared:
                scenario.requests()
                prepared.add(asked)
            shown = {
                name: _shown(settings.get(name.removeprefix(POLICY)))
                if name.startswith(POLICY)
                else _shown(given.get(name, getattr(scenario, name, None)))
                for name in varied
            }
            key = key_of(scenario)
        except DsimError as error:
            said = ", ".join(f"{name}={cut(_shown(given[name]))}" for name in varied if name in given)
            raise type(error)(f"{where}: cell {i} ({said}): {error}") from None
        if profile.is_estimate:
            estimated[profile.name] = None
        implementations[profile.implementation] = None
        cells.setdefault(key, Cell(key, shown, scenario))  # equal cells run once
    return Plan(title, varied, tuple(cells.values()), config, tuple(estimated), tuple(implementations))


def scenario_of(folder: Path, given: Json, allow_code: AllowedCode = NO_CODE) -> Scenario:
    """`policy.*` join the SPEC; files get absolute paths."""
    plain = {name: value for name, value in given.items() if "." not in name and name != FLEET}
    if "trace" not in plain:
        raise DsimError("there is no trace, expected one in [base], [grid] or [[list]]")
    settings = [f"{n.removeprefix(POLICY)}={spelt(v)}" for n, v in given.items() if n.startswith(POLICY)]
    policy, profile = placed(plain.get("policy", Scenario.policy))
    if profile is not None:
        plain["profile"] = profile
    if policy.endswith(".toml"):
        if settings:
            raise DsimError(f"policy is the file {policy} and policy.{settings[0]} is given, expected one of them")
        plain["policy"] = _found(folder, policy)
    else:
        plain["policy"] = ",".join([with_file(policy, lambda path: _found(folder, path)), *settings])
    for name in FILES:
        if plain.get(name) is not None:
            plain[name] = _found(folder, plain[name])
    scenario = Scenario(**plain, allow_code=allow_code)
    if given.get(FLEET) is not None:
        return _on_fleet(scenario, folder, given)
    for name in filter(_of_a_pool, given):
        raise DsimError(f"{name} is {cut(_shown(given[name]))} and there is no fleet, expected a file with its pools")
    return scenario


def _on_fleet(scenario: Scenario, folder: Path, given: Json) -> Scenario:
    """DsimError if another field describes the fleet too."""
    own = {"policy", "profile", "workload", "replicas", *(field.name for field in fields(FleetWords))}
    for name, value in given.items():
        if name in own or name.startswith(POLICY):
            raise DsimError(f"fleet is {cut(given[FLEET])} and {name} is {cut(_shown(value))}, expected the file alone")
    words = FleetWords.read(_found(folder, given[FLEET]))
    values = {name: value for name, value in given.items() if _of_a_pool(name)}
    if values:
        words = with_parts(words, values, scenario.allow_code)
    return on_fleet([scenario], words, named=False)[0]


def _of_a_pool(name: str) -> bool:
    """Such as decode.max_batch."""
    return "." in name and not name.startswith(POLICY)


def check_values(scenario: Scenario) -> None:
    """Check fields that neither policy, profile nor trace checks before the simulation."""
    _ = scenario.routing()
    if scenario.emit not in EMIT:
        raise DsimError(f"emit is {cut(scenario.emit)}, expected one of: {', '.join(EMIT)}")
    for name in ("replicas", "concurrency", "num_requests"):
        value = getattr(scenario, name)
        if value is not None and value < 1:
            raise DsimError(f"{name} is {value}, expected at least 1")
    check_together(scenario)


def check_together(scenario: Scenario) -> None:
    """Check fields that exclude each other."""
    closed = scenario.concurrency is not None
    if closed and (scenario.arrival != "trace" or scenario.rate is not None or not scenario.drain):
        raise DsimError(f"concurrency is {scenario.concurrency}: a closed loop has no arrival, rate or drain = false")
    if closed and scenario.sessions:
        raise DsimError(f"concurrency is {scenario.concurrency} and sessions is true, expected one of them")


def _found(folder: Path, name: str) -> str:
    """The file next to the configuration or in the current folder, else the name."""
    path, _ = without_limit(name)  # lengths may end in a limit
    near = [found for found in (folder / path, Path(path).absolute()) if os.path.isfile(found)]
    return str(near[0]) + name[len(path) :] if near else name


def _shown(value: Any) -> Any:
    """As a cell of the table."""
    if isinstance(value, tuple):
        return ("/" if value and isinstance(value[0], int) else ", ").join(str(item) for item in value)
    return value
