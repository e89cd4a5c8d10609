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
from ..engine.spec import settings_of, with_files
from ..files.read import FilePath, cut, did_you_mean, quoted, read_toml
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


def read_plan(config: FilePath | Mapping[str, Any], allow_code: AllowedCode = NO_CODE) -> Plan:
    """The cells; DsimError names the first invalid field or value. allow_code: files that policies may name."""
    if isinstance(config, Mapping):
        title, source, folder, content = "sweep", "config", Path.cwd(), dict(config)
    else:
        title, source, folder = Path(config).stem, str(config), Path(config).absolute().parent
        content = read_toml(config)
    file = FileObject(source, "", content, (), optional={"title": title, "base": {}, "grid": {}})
    base = {name: value_of(f"{source}: base.{name}", name, v) for name, v in _flat(file.section("base")).items()}
    choices: dict[str, list[Any]] = {}
    for name, values in _flat(file.section("grid")).items():
        place = f"{source}: grid.{name}"
        if not isinstance(values, list) or not values:
            raise DsimError(f"{place} is {quoted(values)}, expected a list of values; a single one belongs in [base]")
        choices[name] = [value_of(place, name, value) for value in values]
    if not choices:
        raise DsimError(f"{source}: there is nothing to vary, expected fields in [grid]")
    num_cells = math.prod(map(len, choices.values()))
    if num_cells > MOST_CELLS:
        raise DsimError(f"{source}: asks for {num_cells} cells, expected at most {MOST_CELLS}")
    cells: dict[str, Cell] = {}
    services: dict[tuple[Any, ...], World] = {}
    for i, point in enumerate((base | point for point in grid(choices)), 1):  # all are checked before any runs
        try:
            world = world_of(folder, point, allow_code)
            for _, setting in world.each_pool():
                setting.check()
            check_values(world)
            world.requests()
            key = key_of(world)
        except DsimError as error:
            summary = ", ".join(f"{name}={cut(_shown(point[name]))}" for name in choices)
            raise type(error)(f"{source}: cell {i} ({summary}): {error}") from None
        services.setdefault((world.trace, world.label, world.profile, world.workload, world.links), world)
        settings = {f"{POLICY}{name}": value for name, value in settings_of(world.parsed_policy()).items()}
        values = {**vars(world), **settings, **point}
        # A policy's own field as parsed: `candidates=2/8`.
        labels = {name: _shown(settings.get(name, values.get(name))) for name in choices}
        cells.setdefault(key, Cell(key, labels, world))  # equal cells run once
    worlds = tuple(services.values())
    return Plan(file.text("title"), tuple(choices), tuple(cells.values()), config=content, services=worlds)


def key_of(world: World) -> str:
    return digest(asked_of(world))[:24]


def _flat(table: FileObject) -> Json:
    """`policy.chunk = 4` without quotes is a TOML table."""
    flat: Json = {}
    for name, value in table.values.items():
        if isinstance(value, Mapping) and name == "policy":
            flat |= {f"{POLICY}{field}": setting for field, setting in value.items()}
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
        hint = did_you_mean(name, TYPES)
        raise DsimError(f"{place}: there is no field {quoted(name)}{hint}; there are {', '.join(TYPES)} and policy.*")
    kinds = typing.get_args(TYPES[name]) or (TYPES[name],)
    try:
        if typing.get_origin(TYPES[name]) is tuple:
            if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                raise ValueError("a list of SLOs")
            return tuple(str(Slo.parse(item)) for item in value)
        if value == "none" and types.NoneType in kinds:
            return None
        if isinstance(value, str) and str in kinds:
            return value
        return plain(value, kinds[0])
    except DsimError as error:
        raise DsimError(f"{place}: {error}") from None
    except ValueError as error:
        raise DsimError(f"{place} is {quoted(value)}, expected {error}") from None


def world_of(folder: Path, values: Point, allow_code: AllowedCode = NO_CODE) -> World:
    """The world at a point of a configuration; files get absolute paths."""
    if "trace" not in values:
        raise DsimError("there is no trace, expected one in [base] or [grid]")
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
        point["policy"] = with_files(policy, lambda path: _near(folder, path))
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
