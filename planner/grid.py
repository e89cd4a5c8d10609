"""Read a sweep's configuration into checked cells."""

import math
import os
import types
import typing
from collections.abc import Mapping
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
from ..results.fleet_file import FleetWords
from ..results.slo import Slo
from ..results.world import World, on_fleet
from ..traces.lengths import without_limit
from .candidate import Point, grid, world_at
from .contents import Json, asked_of, digest

MOST_CELLS = 100_000  # all are checked, stored and drawn
POLICY = "policy."  # of `policy.chunk`, a field of the SPEC
NOT_VARIED = ("allow_code", "check_rules", "slower", "profile_object", "pools", "links", "decider")
FILES = ("trace", "profile", "yields", "lengths")  # may name a file
# Which requests, apart from the seed, and their SLOs' classes.
OF_REQUESTS = (
    "trace", "arrival", "rate", "lengths", "concurrency", "num_requests",
    "time_unit", "skip_bad", "columns", "only", "slos",
)  # fmt: skip
FLEET = "fleet"  # a file that sets several fields
TYPES: dict[str, Any] = {n: kind for n, kind in typing.get_type_hints(World).items() if n not in NOT_VARIED}
TYPES[FLEET] = str | None


@dataclass(frozen=True)
class Cell:
    key: str  # digest of its question
    varied: Mapping[str, Any]  # in the table's order
    world: World


@dataclass(frozen=True)
class Plan:
    """A checked configuration; cells in table order."""

    title: str
    varied: tuple[str, ...]
    cells: tuple[Cell, ...]
    config: Json  # as given
    services: tuple[World, ...]  # the first cell of each trace, policy and fleet


def read_plan(config: str | Path | Mapping[str, Any], allow_code: AllowedCode = NO_CODE) -> Plan:
    """The cells; DsimError names the first invalid field or value. allow_code: files that policies may name."""
    if isinstance(config, Mapping):
        title, source, folder, content = "sweep", "config", Path.cwd(), dict(config)
    else:
        title, source, folder = Path(config).stem, str(config), Path(config).absolute().parent
        content = read_toml(config)
    file = FileObject(source, "", content, (), optional={"title": title, "base": {}, "grid": {}, "list": []})
    base = _values(file.section("base"), f"{source}: base.")
    choices: dict[str, list[Any]] = {}
    for name, values in _flat(file.section("grid")).items():
        place = f"{source}: grid.{name}"
        if not isinstance(values, list) or not values:
            raise DsimError(f"{place} is {quoted(values)}, expected a list of values; a single one belongs in [base]")
        choices[name] = [value_of(place, name, value) for value in values]
    listed = [_values(cell, f"{source}: list {i}, ") for i, cell in enumerate(file.sections("list"), 1)]
    if not choices and not listed:
        raise DsimError(f"{source}: there is nothing to vary, expected fields in [grid] or cells in [[list]]")
    num_cells = math.prod(map(len, choices.values())) + len(listed)
    if num_cells > MOST_CELLS:
        raise DsimError(f"{source}: asks for {num_cells} cells, expected at most {MOST_CELLS}")
    points = [*(grid(choices) if choices else ()), *listed]
    varied = tuple(dict.fromkeys([*choices, *(name for point in listed for name in point)]))
    # Every cell is checked before any runs.
    cells: dict[str, Cell] = {}
    services: dict[Any, World] = {}
    ready: set[Any] = set()  # by OF_REQUESTS
    of_service = [name for name in World.__dataclass_fields__ if name not in (*OF_REQUESTS[1:], "seed")]
    for i, point in enumerate((base | point for point in points), 1):
        try:
            world = world_of(folder, point, allow_code)
            service, trace = (tuple(getattr(world, name) for name in names) for names in (of_service, OF_REQUESTS))
            if service not in services:
                for _, setting in world.each_pool():
                    setting.check()
                services[service] = world
            check_values(world)
            if trace not in ready:
                world.requests()
                ready.add(trace)
            key = key_of(world)
        except DsimError as error:
            summary = ", ".join(f"{name}={cut(_shown(point[name]))}" for name in varied if name in point)
            raise type(error)(f"{source}: cell {i} ({summary}): {error}") from None
        labels = {}
        settings = settings_of(services[service].parsed_policy())
        for name in varied:
            value = point.get(name, getattr(world, name, None))
            labels[name] = _shown(settings.get(name.removeprefix(POLICY)) if name.startswith(POLICY) else value)
        cells.setdefault(key, Cell(key, labels, world))  # equal cells run once
    return Plan(file.text("title"), varied, tuple(cells.values()), content, tuple(services.values()))


def key_of(world: World) -> str:
    return digest(asked_of(world))[:24]


def _values(table: FileObject, place: str) -> Json:
    return {name: value_of(f"{place}{name}", name, value) for name, value in _flat(table).items()}


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
    if "." in name:  # a policy's
        if isinstance(value, list | tuple):
            return "/".join(str(item) for item in value)
        if not isinstance(value, bool | int | float | str) or (isinstance(value, str) and "," in value):
            expected = "a number, true or false, a word, or a list of numbers"
            raise DsimError(f"{place} is {quoted(value)}, expected {expected}")
        return value
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
    try:
        if typing.get_origin(kind) is not tuple:
            return plain(value, kind)
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ValueError("a list of SLOs")
        return tuple(str(Slo.parse(item)) for item in value)
    except DsimError as error:
        raise DsimError(f"{place}: {error}") from None
    except ValueError as error:
        raise DsimError(f"{place} is {quoted(value)}, expected {error}") from None


def world_of(folder: Path, values: Point, allow_code: AllowedCode = NO_CODE) -> World:
    """The world at a point of a configuration; files get absolute paths."""
    if "trace" not in values:
        raise DsimError("there is no trace, expected one in [base], [grid] or [[list]]")
    point = {name: _near(folder, value) if name in FILES and value else value for name, value in values.items()}
    world = World(point.pop("trace"), allow_code=allow_code)
    if (fleet := point.pop(FLEET, None)) is not None:
        of_fleet = {"policy", "profile", "workload", "replicas", *(field.name for field in fields(FleetWords))}
        for name, value in point.items():
            if name in of_fleet or name.startswith(POLICY):
                raise DsimError(f"fleet is {cut(fleet)} and {name} is {cut(_shown(value))}, expected the file alone")
        [world] = on_fleet([world], FleetWords.read(_near(folder, fleet)), trusted=False)
        return world_at(world, point)
    policy, profile = placed(point.get("policy", World.policy))
    if profile is not None:
        point["profile"] = profile
    if policy.endswith(".toml"):
        for name in point:
            if name.startswith(POLICY):
                raise DsimError(f"policy is the file {policy} and {name}={point[name]} is given, expected one of them")
        point["policy"] = _near(folder, policy)
    else:
        point["policy"] = with_file(policy, lambda path: _near(folder, path))
    return world_at(world, point)


def check_values(world: World) -> None:
    """Check fields that neither policy, profile nor trace checks before the simulation."""
    _ = world.routing()
    if world.emit not in EMIT:
        raise DsimError(f"emit is {cut(world.emit)}, expected one of: {', '.join(EMIT)}")
    for name in ("replicas", "concurrency", "num_requests"):
        value = getattr(world, name)
        if value is not None and value < 1:
            raise DsimError(f"{name} is {value}, expected at least 1")
    check_together(world)


def check_together(world: World) -> None:
    """Check fields that exclude each other."""
    closed = world.concurrency is not None
    if closed and (world.arrival != "trace" or world.rate is not None or not world.drain):
        raise DsimError(f"concurrency is {world.concurrency}: a closed loop has no arrival, rate or drain = false")
    if closed and world.sessions:
        raise DsimError(f"concurrency is {world.concurrency} and sessions is true, expected one of them")


def _near(folder: Path, name: str) -> str:
    """The file next to the configuration or in the current folder, else the name."""
    path, _ = without_limit(name)  # lengths may end in a limit
    for place in (folder / path, Path(path).absolute()):
        if os.path.isfile(place):
            return str(place) + name[len(path) :]
    return name


def _shown(value: Any) -> Any:
    """As a cell of the table."""
    if isinstance(value, tuple):
        return ("/" if value and isinstance(value[0], int) else ", ").join(str(item) for item in value)
    return value
