"""An experiment: a published figure or table as a TOML file, read and checked. docs/reproduce.md has its keys."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.errors import DsimError
from ..files.read import cut, quoted, read_toml
from ..planner.grid import check_values, scenario_of, value_of
from ..results.scenario import Scenario
from .machine import Machine
from .measure import known_measure
from .memory import RUNS

SHIPPED = Path(__file__).parent / "experiments"
KEYS = ("title", "system", "citation", "conditions", "measures", "axis", "seeds", "base", "machine", "over", "series")
SERIES = ("name", "over", "machine", "measures", "published", "calibrated", "why")
CALIBRATED, PREDICTED, UNPUBLISHED = "calibrated", "predicted", "no published value here"
MAX_SEEDS = 64


@dataclass(frozen=True)
class Run:
    """One point of a series: a scenario on a machine, or the memory of one."""

    at: str  # where on the axis, in words
    scenario: Scenario
    machine: Machine
    memory: str | None  # of which code, one of memory.RUNS; None: the scenario is replayed


@dataclass(frozen=True)
class Series:
    """A line of a figure, or a row of a table."""

    name: str
    runs: tuple[Run, ...]
    measures: tuple[str, ...]
    published: Mapping[str, Mapping[str, float]]  # by measure and place on the axis
    calibrated: tuple[str, ...]  # measures whose published values a constant of dsim was moved to
    why: str  # the constants, and what else sets the series apart

    def status(self, measure: str, published: float | None) -> str:
        """The prediction's error beside a published value."""
        if published is None:
            return UNPUBLISHED
        return CALIBRATED if measure in self.calibrated else PREDICTED


@dataclass(frozen=True)
class Experiment:
    """A published figure or table."""

    name: str
    title: str
    system: str
    citation: str
    conditions: str  # what the publication says of its conditions, and what is assumed where it says nothing
    axis: str
    seeds: int
    series: tuple[Series, ...]


def shipped() -> dict[str, Path]:
    """The experiments that dsim ships, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def read(name: str, allow_code: AllowedCode = NO_CODE) -> Experiment:
    """The shipped experiment of that name, or the one in that file; a DsimError says what it may not hold.

    allow_code: the files of code that its policies may name.
    """
    path = Path(name)
    if not os.path.isfile(path):
        held = shipped()
        if name not in held:
            raise DsimError(f"no file or shipped experiment is named {cut(name)}; shipped: {', '.join(held)}")
        path = held[name]
    where, data = str(path) if path.parent != SHIPPED else path.stem, read_toml(path)
    _only(where, data, KEYS)
    texts = {key: _text(where, data, key) for key in ("title", "system", "citation", "conditions", "axis")}
    seeds = data.get("seeds", 1)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or not 1 <= seeds <= MAX_SEEDS:
        raise DsimError(f"{where}: seeds is {quoted(seeds)}, expected 1 to {MAX_SEEDS}")
    measures = _measures(where, data.get("measures", []))
    base, over = _table(where, data, "base"), _table(where, data, "over")
    machine = _table(where, data, "machine")
    tables = data.get("series", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, Mapping) for table in tables):
        raise DsimError(f"{where}: series is {quoted(tables)}, expected [[series]] tables")
    series: list[Series] = []
    for i, table in enumerate(tables, 1):
        place = f"{where}: series {i}"
        made = _series(place, path.parent, texts["axis"], base, over, machine, measures, table, allow_code)
        if made.name in {s.name for s in series}:
            raise DsimError(f"{place}: name is {quoted(made.name)} a second time, expected another")
        series.append(made)
    names = [s.name for s in series]
    for s in series:
        for measure in s.measures:
            known_measure(f"{where}: {cut(s.name)}", measure, names)
    return Experiment(path.stem, seeds=seeds, series=tuple(series), **texts)


def _series(
    where: str, folder: Path, axis: str, base: Mapping[str, Any], over: Mapping[str, Any], machine: Mapping[str, Any],
    measures: tuple[str, ...], table: Mapping[str, Any], allow_code: AllowedCode,
) -> Series:  # fmt: skip
    own = {key: value for key, value in table.items() if key not in SERIES}
    name, why = _text(where, table, "name"), _text(where, table, "why", "")
    where = f"{where} ({cut(name)})"
    over = {**over, **_table(where, table, "over")}
    points = _points(where, axis, over)
    runs = tuple(
        _run(where, folder, at, {**base, **own, **fields}, {**machine, **_table(where, table, "machine")}, allow_code)
        for at, fields in points
    )
    places = [run.at for run in runs]
    published = {
        measure: _published(f"{where}: published {quoted(measure)}", values, places)
        for measure, values in _table(where, table, "published").items()
    }
    calibrated = table.get("calibrated", [])
    if not isinstance(calibrated, list) or not all(isinstance(item, str) and item in published for item in calibrated):
        raise DsimError(f"{where}: calibrated is {quoted(calibrated)}, expected measures with published values")
    if calibrated and not why:
        raise DsimError(f"{where}: calibrated is {quoted(calibrated)} and why is missing, expected what was moved")
    wanted = [*measures, *_measures(where, table.get("measures", [])), *published]
    return Series(name, runs, tuple(dict.fromkeys(wanted)), published, tuple(calibrated), why)


def _points(where: str, axis: str, over: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The places on the axis and the fields that differ there: the lists of [over] side by side."""
    for field, values in over.items():
        if not isinstance(values, list) or not values:
            raise DsimError(f"{where}: over.{cut(field)} is {quoted(values)}, expected a list of values")
    if axis not in over:
        raise DsimError(f"{where}: axis is {quoted(axis)} and over has {cut(', '.join(over)) or 'nothing'}")
    lengths = {len(values) for values in over.values()}
    if len(lengths) > 1:
        said = ", ".join(f"{field} {len(values)}" for field, values in over.items())
        raise DsimError(f"{where}: the lists of over differ in length ({cut(said)}), expected one value each a place")
    places = [_place(value) for value in over[axis]]
    if len(set(places)) < len(places):
        raise DsimError(f"{where}: over.{axis} names a place twice: {cut(', '.join(places))}")
    given = {field: values for field, values in over.items() if field != "at"}
    return [(at, {field: values[i] for field, values in given.items()}) for i, at in enumerate(places)]


def _run(
    where: str, folder: Path, at: str, fields: Mapping[str, Any], machine: Mapping[str, Any], allow_code: AllowedCode
) -> Run:
    where = f"{where} at {cut(at)}"
    fields = dict(fields)
    memory = fields.pop("memory", None)
    if memory is not None and not (isinstance(memory, str) and memory in RUNS):
        raise DsimError(f"{where}: memory is {quoted(memory)}, expected one of: {', '.join(RUNS)}")
    machine = dict(machine)
    if "profile" in fields:
        machine["profile"] = fields.pop("profile")
    # `machine.` fields may differ along the axis, too.
    machine |= {key.removeprefix("machine."): fields.pop(key) for key in list(fields) if key.startswith("machine.")}
    described = Machine.read(where, machine)
    given = {name: value_of(f"{where}: {cut(name)}", name, value) for name, value in fields.items()}
    try:
        scenario = scenario_of(folder, {"trace": "azure-conv", **given}, allow_code)
        check_values(scenario)
        scenario.parsed_policy()
    except DsimError as error:
        raise type(error)(f"{where}: {error}") from None
    return Run(at, scenario, described, memory)


def _published(where: str, values: Any, places: Sequence[str]) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise DsimError(f"{where} is {quoted(values)}, expected a table: {cut(places[0])} = 1.0")
    for place, value in values.items():
        if place not in places:
            raise DsimError(
                f"{where}: there is no place {quoted(place)} on the axis; there are {cut(', '.join(places))}"
            )
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
            raise DsimError(f"{where}: {cut(place)} is {quoted(value)}, expected a number")
    return {place: float(value) for place, value in values.items()}


def _place(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _measures(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DsimError(f"{where}: measures is {quoted(value)}, expected a list of names")
    return tuple(value)


def _only(where: str, data: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in data:
        if key not in keys:
            raise DsimError(f"{where}: there is no key {quoted(key)}, expected {', '.join(keys)}")


def _table(where: str, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, Mapping):
        raise DsimError(f"{where}: {key} is {quoted(value)}, expected a table")
    return value


def _text(where: str, data: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = data.get(key, default)
    if not isinstance(value, str) or (default is None and not value):
        raise DsimError(f"{where}: {key} is {quoted(value)}, expected text")
    return value
