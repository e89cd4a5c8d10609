"""An experiment: a published figure or table as a checked TOML file (README.md)."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from ...engine.allowed_code import NO_CODE, AllowedCode
from ...engine.errors import DsimError
from ...engine.plain import SIGNED, Range
from ...files.read import cut, quoted, read_toml, shown
from ...files.schema import FileObject
from ...planner.grid import check_values, value_of, world_of
from ...results.world import World
from .machine import Machine, OnMachine
from .measures import known_measure
from .peak_memory import RUNS

SHIPPED = Path(__file__).parent / "experiments"
TEXTS = ("title", "system", "citation", "conditions", "axis")
OPTIONAL = {"seeds": 1, "measures": [], "base": {}, "over": {}, "machine": {}, "series": []}
# Keys of a series with defaults; others are the world's.
SERIES: dict[str, Any] = {
    "name": "", "over": {}, "machine": {}, "measures": [], "published": {}, "calibrated": [], "at_least": [], "why": "",
}  # fmt: skip
MAX_SEEDS = 64
CALIBRATED, PREDICTED, UNPUBLISHED = "calibrated", "predicted", "no published value here"
AT_LEAST = "predicted over a published lower bound"


@dataclass(frozen=True)
class PlacedRun:
    """A point of a series: a replay, or a memory calculation."""

    at: str  # on the axis
    world: OnMachine
    memory: str | None  # of memory.RUNS; None: replay the world


@dataclass(frozen=True)
class Series:
    """A line of a figure, or a row of a table."""

    name: str
    runs: tuple[PlacedRun, ...]
    measures: tuple[str, ...]
    published: Mapping[str, Mapping[str, float]]  # by measure and position
    calibrated: tuple[str, ...]  # measures whose published values calibrated a constant of dsim
    at_least: tuple[str, ...]  # measures published as lower bounds
    why: str  # constants and other differences

    def status(self, measure: str, published: float | None) -> str:
        """How to read a prediction's error."""
        if published is None:
            return UNPUBLISHED
        if measure in self.calibrated:
            return CALIBRATED
        return AT_LEAST if measure in self.at_least else PREDICTED


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    system: str
    citation: str
    conditions: str  # as published, plus assumptions
    axis: str
    seeds: int
    series: tuple[Series, ...]


def shipped() -> dict[str, Path]:
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def read(name: str, allow_code: AllowedCode = NO_CODE) -> Experiment:
    """Shipped, or a file. allow_code: files that its policies may name."""
    path = Path(name)
    if not os.path.isfile(path):
        held = shipped()
        if name not in held:
            raise DsimError(f"no file or shipped experiment is named {cut(name)}; shipped: {', '.join(held)}")
        path = held[name]
    where = str(path) if path.parent != SHIPPED else path.stem
    given = FileObject(where, "", read_toml(path), TEXTS, optional=OPTIONAL)
    texts = {key: _filled(given, key) for key in TEXTS}
    seeds = given.integer("seeds", Range(1, MAX_SEEDS))
    tables = given.items("series")
    if not tables or not all(isinstance(table, Mapping) for table in tables):
        raise given.error("series", tables, "[[series]] tables")
    series: list[Series] = []
    for i, table in enumerate(tables, 1):
        found = _series(given, FileObject(f"{where}: series {i}", "", table), path.parent, allow_code)
        if found.name in {s.name for s in series}:
            raise DsimError(f"{where}: series {i}: name is {quoted(found.name)} a second time, expected another")
        series.append(found)
    names = [s.name for s in series]
    for s in series:
        for measure in s.measures:
            known_measure(f"{where}: {cut(s.name)}", measure, names)
    return Experiment(path.stem, seeds=seeds, series=tuple(series), **texts)


def _series(given: FileObject, table: FileObject, folder: Path, allow_code: AllowedCode) -> Series:
    name = _filled(table, "name")
    own = {key: value for key, value in table.values.items() if key not in SERIES}
    table = FileObject(f"{table.path} ({cut(name)})", "", {**SERIES, **table.values})
    why = table.text("why")
    base, over, machine = given.section("base").values, _both(given, table, "over"), _both(given, table, "machine")
    runs = tuple(
        _run(table.path, folder, at, {**base, **own, **fields}, machine, allow_code)
        for at, fields in _points(table.path, given.text("axis"), over)
    )
    published = _published(table, [run.at for run in runs])
    calibrated = table.get("calibrated", tuple[str, ...])
    if not set(calibrated) <= set(published):
        raise table.error("calibrated", ", ".join(calibrated), "measures with published values")
    if calibrated and not why:
        raise DsimError(f"{table.path}: calibrated is {quoted(calibrated)} and why is missing, expected what was moved")
    at_least = table.get("at_least", tuple[str, ...])
    if not set(at_least) <= set(published) - set(calibrated):
        raise table.error("at_least", ", ".join(at_least), "measures with published values, not calibrated")
    measures = [*given.get("measures", list[str]), *table.get("measures", list[str]), *published]
    return Series(name, runs, tuple(dict.fromkeys(measures)), published, calibrated, at_least, why)


def _both(given: FileObject, table: FileObject, key: str) -> dict[str, Any]:
    return {**given.section(key).values, **table.section(key).values}


def _points(where: str, axis: str, over: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Axis positions with their fields: item i of every list in [over]."""
    for field, values in over.items():
        if not isinstance(values, list) or not values:
            raise DsimError(f"{where}: over.{cut(field)} is {shown(values)}, expected a list of values")
    if axis not in over:
        raise DsimError(f"{where}: axis is {quoted(axis)} and over has {cut(', '.join(over)) or 'nothing'}")
    if len({len(values) for values in over.values()}) > 1:
        lengths = ", ".join(f"{field} {len(values)}" for field, values in over.items())
        raise DsimError(f"{where}: the lists of over differ in length ({cut(lengths)}), expected one value a place")
    places = [_place(value) for value in over[axis]]
    if len(set(places)) < len(places):
        raise DsimError(f"{where}: over.{axis} names a place twice: {cut(', '.join(places))}")
    given = {field: values for field, values in over.items() if field != "at"}
    return [(at, {field: values[i] for field, values in given.items()}) for i, at in enumerate(places)]


def _run(
    where: str, folder: Path, at: str, fields: Mapping[str, Any], machine: Mapping[str, Any], allow_code: AllowedCode
) -> PlacedRun:
    given = FileObject(f"{where} at {cut(at)}", "", fields)
    memory = given.text("memory", *RUNS) if "memory" in fields else None
    of_machine = dict(machine)
    if "profile" in fields:
        of_machine["profile"] = fields["profile"]
    # `machine.` fields may vary along the axis too.
    prefix = "machine."
    of_machine |= {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    described = Machine.read(given.path, of_machine)
    plain = {name: value for name, value in fields.items()
             if name not in ("memory", "profile") and not name.startswith(prefix)}  # fmt: skip
    values = {name: value_of(f"{given.path}: {cut(name)}", name, value) for name, value in plain.items()}
    try:
        world = world_of(folder, {"trace": "azure-conv", **values}, allow_code)
        check_values(world)
        world.parsed_policy()
    except DsimError as error:
        raise type(error)(f"{given.path}: {error}") from None
    own = {f.name: getattr(world, f.name) for f in dataclass_fields(World)}
    return PlacedRun(at, OnMachine(**own, machine=described), memory)


def _published(table: FileObject, places: Sequence[str]) -> dict[str, dict[str, float]]:
    found = table.section("published")
    for measure in found.values:
        for place in found.section(measure).values:
            if place not in places:
                raise DsimError(
                    f"{table.path}: published {quoted(measure)}: there is no place {quoted(place)} on the axis; there "
                    f"are {cut(', '.join(places))}"
                )
    values: dict[str, dict[str, float]] = table.get("published", dict[str, dict[str, float]], SIGNED)
    return values


def _place(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _filled(given: FileObject, key: str) -> str:
    text = given.text(key)
    if not text:
        raise given.error(key, text, "a text")
    return text
