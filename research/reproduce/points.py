"""Run experiments point by point, resumably, next to published values."""

import json
import math
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...engine.errors import DsimError
from ...files.place import FolderKind
from ...files.read import quoted, read_csv
from ...files.write import csv_of, write_whole
from ...planner.backend import Outcome, Pool
from ...planner.capacity import capacity
from ...planner.contents import asked_of
from ...planner.grid import key_of
from ...planner.memo import FILES as STORE_FILES
from ...planner.memo import STORE, StoreFolder
from ...planner.replicate import student
from .experiment import AT_LEAST, PREDICTED, Experiment, PlacedRun, Series
from .machine import OnMachine
from .measures import MEASURES, OVER, of_run, unit_of
from .peak_memory import GIB, Sizes, peak, shortage

SCHEMA, VERSION = "dsim-reproduce", 1
FILES = ("reproduce.json", STORE, "results.csv", "report.html")
FOLDER = FolderKind(
    "reproduced experiments", (*FILES, *STORE_FILES), "reproduce.json", SCHEMA, store=STORE
)  # fmt: skip
RECORDED = Path(__file__).parent / "recorded.csv"
PLACE = ("experiment", "series", "at", "measure")
CAPACITY_REPLICATIONS = 3
ROUGH = 0.05  # precision of a capacity


@dataclass(frozen=True)
class ResultRow:
    """A value: published, predicted, and how far to trust it."""

    experiment: str
    series: str
    at: str
    measure: str
    unit: str
    published: float | None
    predicted: float | None  # None: it failed
    half: float | None  # of the 95 % interval over seeds; None: one seed
    status: str
    note: str  # constants, or why there is no prediction
    recorded: float | None  # a prediction before the published value was known
    recorded_on: str  # its date and commit
    shortage: str | None = None  # the tensor that exceeds the device's memory

    @property
    def error(self) -> float | None:
        """Predicted / published - 1; None without either, or if a lower bound is met."""
        if not self.published or self.predicted is None:
            return None
        error = self.predicted / self.published - 1.0
        return None if self.status == AT_LEAST and error >= 0 else error


@dataclass(frozen=True)
class Reproduced:
    """Partial after an interrupt."""

    experiments: tuple[Experiment, ...]
    rows: tuple[ResultRow, ...]
    num_run: int
    num_reused: int
    num_points: int
    interrupted: bool
    date: str
    commit: str

    def to_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        about = ("name", "title", "system", "citation", "conditions", "axis", "seeds")
        return {
            "dsim": __version__, "date": self.date, "commit": self.commit, "interrupted": self.interrupted,
            "num_points": self.num_points, "num_run": self.num_run, "num_reused": self.num_reused,
            "experiments": [{name: getattr(e, name) for name in about} for e in self.experiments],
            "rows": [{f.name: getattr(row, f.name) for f in fields(row)} | {"error": row.error} for row in self.rows],
            "summary": summary(self.rows),
        }  # fmt: skip


def summary(rows: Sequence[ResultRow]) -> dict[str, dict[str, Any]]:
    """By status: values, median and largest error."""
    out: dict[str, dict[str, Any]] = {}
    for status in dict.fromkeys(row.status for row in rows):
        of_it = [row for row in rows if row.status == status]
        errors = [abs(row.error) for row in of_it if row.error is not None]
        out[status] = {
            "num": len(of_it), "failed": sum(row.predicted is None for row in of_it),
            "median_error": float(np.median(errors)) if errors else None,
            "worst_error": max(errors) if errors else None,
        }  # fmt: skip
    return out


@dataclass(frozen=True)
class SeededRun:
    """A run with one seed, for any process."""

    run: PlacedRun
    measures: tuple[str, ...]  # without ratios
    seed: int

    @property
    def world(self) -> OnMachine:
        return replace(self.run.world, seed=self.run.world.seed + self.seed)

    @property
    def key(self) -> str:
        return f"{key_of(self.world)}-{self.run.memory or ''}-{','.join(self.measures)}"


def _points(e: Experiment) -> Iterator[tuple[Series, SeededRun]]:
    for series in e.series:
        own = tuple(dict.fromkeys(measure.partition(OVER)[0] for measure in series.measures))
        for run in series.runs:
            for seed in range(e.seeds):
                yield series, SeededRun(run, own, seed)


def reproduce(
    experiments: Sequence[Experiment],
    out: Path | None = None,
    *,
    published: Mapping[tuple[str, ...], float] | None = None,
    seeds: int | None = None,
    jobs: int | None = None,
    ray: str | None = None,
    force: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
    page: Callable[[Reproduced], str] | None = None,
) -> Reproduced:
    """Run the experiments' points that `out` lacks.

    published: values by PLACE (`read_published`). seeds: replaces the experiments' own number. jobs, ray: see
    `Pool`. page: makes report.html. Ctrl-C keeps the finished points.
    """
    if seeds is not None:
        experiments = [replace(e, seeds=seeds) for e in experiments]
    points, names = {}, {}
    for e in experiments:
        for series, point in _points(e):
            points[point.key], names[point.key] = point, f"{e.name}: {series.name} at {point.run.at}"
    with StoreFolder(out, FOLDER, force=force) as folder, Pool(jobs, ray) as pool:
        folder.begin()
        outcomes: dict[str, Outcome[Any]] = {}
        with suppress(KeyboardInterrupt), closing(folder.memo.run(pool, _values, points, _question)) as running:
            for outcome in running:
                outcomes[outcome.key] = outcome
                if progress is not None:
                    progress(len(outcomes), len(points), names[outcome.key])
        done = {key: _entry(outcome) for key, outcome in outcomes.items()}
        num_reused = sum(outcome.is_stored for outcome in outcomes.values())
        rows = tuple(_rows(experiments, done, published or {}))
        found = Reproduced(
            tuple(experiments),
            rows,
            len(done) - num_reused,
            num_reused,
            len(points),
            len(outcomes) < len(points),
            date.today().isoformat(),
            commit(),
        )
        _write(folder, found, page)
    return found


def read_published(path: str | Path) -> dict[tuple[str, ...], float]:
    """By PLACE, of a CSV with those columns and `published`, such as a filled-in results.csv."""
    found: dict[tuple[str, ...], float] = {}
    for where, row in read_csv(path, (*PLACE, "published")):
        text = row["published"].strip()
        if text:
            found[tuple(row[name] for name in PLACE)] = _finite(where, "published", text)
    return found


def commit() -> str:
    """Of dsim's clone, with + if files changed; empty without a clone."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        said = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()


def _entry(outcome: Outcome[dict[str, float]]) -> dict[str, Any]:
    return {"values": outcome.value} if outcome.error is None else {"error": outcome.error}


def _question(point: SeededRun) -> dict[str, Any]:
    return asked_of(point.world, of=point.measures, code=point.run.memory)


def _values(point: SeededRun) -> dict[str, float]:
    """In any process."""
    found: dict[str, float] = {}
    world = point.world
    replayed = [m for m in point.measures if m not in MEASURES or MEASURES[m].of is not None]
    if replayed:
        found |= _replayed(world, replayed)
    if "capacity" in point.measures:
        found["capacity"] = sustained(
            world, max_replications=CAPACITY_REPLICATIONS, num_requests=world.num_requests
        )  # fmt: skip
    if "peak_memory" in point.measures:
        if point.run.memory is None:
            raise DsimError(f"{point.run.at}: peak_memory needs the key memory, which names the code")
        found["peak_memory"] = peak(point.run.memory, _sizes(world)) / GIB
    return {name: value for name, value in found.items() if math.isfinite(value)}


def sustained(world: OnMachine, **options: Any) -> float:
    """A capacity: 0 if an SLO is met at no rate, and where the queue starts to grow if all are met until then."""
    try:
        return capacity(world, precision=ROUGH, jobs=1, curve=False, **options).rate.value
    except DsimError as error:
        never, grows = "holds at no rate" in str(error), re.search(r"the (\S+) req/s at which the queue", str(error))
        if not never and grows is None:
            raise
        return 0.0 if grows is None else float(grows[1])


def _replayed(world: OnMachine, measures: Sequence[str]) -> dict[str, float]:
    requests = world.requests()
    result = world.simulate_whole(requests)
    summary = world.summarize(result, requests)
    return {measure: of_run(measure, summary, result) for measure in measures}


def _shortage(point: SeededRun) -> str | None:
    world = point.world
    if point.run.memory is None:
        return None
    return shortage(point.run.memory, _sizes(world), world.loaded_profile().memory.capacity_bytes)


def _sizes(world: OnMachine) -> Sizes:
    requests, policy = world.requests(), world.parsed_policy()
    more = {name: getattr(policy.cache, name) for name in ("retention", "budget") if hasattr(policy.cache, name)}
    return Sizes(
        world.loaded_profile().model, int(requests.input_length[0]), int(requests.output_length[0]),
        policy.block_length, **more,
    )  # fmt: skip


def _rows(
    experiments: Sequence[Experiment], done: Mapping[str, Mapping[str, Any]], given: Mapping[tuple[str, ...], float]
) -> Iterator[ResultRow]:
    recorded = _recorded()
    for e in experiments:
        values: dict[tuple[str, str, str], list[float]] = {}
        errors: dict[tuple[str, str], str] = {}
        finished = set()
        for series, point in _points(e):
            entry, at = done.get(point.key), point.run.at
            if entry is None:
                continue
            finished.add((series.name, at))
            if "error" in entry:
                errors[series.name, at] = str(entry["error"])
            for measure, value in entry.get("values", {}).items():
                values.setdefault((series.name, at, measure), []).append(value)
        for series in e.series:
            for run in series.runs:
                if (series.name, run.at) not in finished:
                    continue
                for measure in series.measures:
                    predicted, half = _estimate(values, series.name, run.at, measure)
                    place = (e.name, series.name, run.at, measure)
                    told = series.published.get(measure, {}).get(run.at)
                    was, when = recorded.get(place, (None, ""))
                    lacking = measure == "peak_memory" and predicted is not None
                    yield ResultRow(
                        *place, unit_of(measure), given.get(place, told), predicted, half,
                        series.status(measure, told) if place not in given or told is not None else PREDICTED,
                        errors.get((series.name, run.at), series.why), was, when,
                        _shortage(SeededRun(run, (), 0)) if lacking else None,
                    )  # fmt: skip


def _estimate(
    values: Mapping[tuple[str, str, str], list[float]], series: str, at: str, measure: str
) -> tuple[float | None, float | None]:
    """Mean over seeds and half-width; a ratio is taken seed by seed."""
    name, over, other = measure.partition(OVER)
    found = np.array(values.get((series, at, name), []))
    if over:
        below = np.array(values.get((other, at, name), []))
        if len(below) != len(found) or not below.all():
            return None, None
        found = found / below
    if not len(found):
        return None, None
    return float(found.mean()), student(found) if len(found) > 1 else None


# Files


def _write(folder: StoreFolder, found: Reproduced, page: Callable[[Reproduced], str] | None) -> None:
    if folder.folder is None or not found.num_run + found.num_reused:
        return  # stopped before any point
    info = {
        "schema": SCHEMA, "version": VERSION, "dsim": __version__, "date": found.date, "commit": found.commit,
        "experiments": [e.name for e in found.experiments], "complete": not found.interrupted,
    }  # fmt: skip
    write_whole(folder.folder / "results.csv", to_csv(found))
    if page is not None:
        write_whole(folder.folder / "report.html", page(found))
    write_whole(folder.folder / "reproduce.json", json.dumps(info, indent=2) + "\n")


COLUMNS = (*PLACE, "unit", "published", "predicted", "half", "error", "status", "date", "commit", "dsim", "note")


def to_csv(found: Reproduced) -> str:
    """results.csv; with `published` filled in, a file for `--published`."""
    rows: list[Sequence[Any]] = [COLUMNS]
    for row in found.rows:
        values: dict[str, Any] = {f.name: getattr(row, f.name) for f in fields(row)}
        values |= {"error": row.error, "date": found.date, "commit": found.commit, "dsim": __version__}
        values["note"] = "; ".join(filter(None, (row.note, row.shortage)))
        rows.append(["" if (v := values[n]) is None else f"{v:.6g}" if isinstance(v, float) else v for n in COLUMNS])
    return csv_of(rows)


def _recorded() -> dict[tuple[str, ...], tuple[float | None, str]]:
    """Of the source tree, by PLACE, with date and commit."""
    if not RECORDED.is_file():
        return {}
    found: dict[tuple[str, ...], tuple[float | None, str]] = {}
    for where, row in read_csv(RECORDED, (*PLACE, "predicted", "date", "commit")):
        value = _finite(where, "predicted", row["predicted"]) if row["predicted"] else None
        found[tuple(row[name] for name in PLACE)] = value, f"{row['date']} {row['commit']}".strip()
    return found


def _finite(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DsimError(f"{where}: {name} is {quoted(text)}, expected a number")
    return value


def check_published(experiments: Sequence[Experiment], given: Mapping[tuple[str, ...], float], path: str) -> None:
    """DsimError for a published value of no point of the experiments."""
    held = {
        (e.name, s.name, run.at, measure) for e in experiments for s in e.series for run in s.runs
        for measure in s.measures
    }  # fmt: skip
    names = {e.name for e in experiments}
    for place in given:
        if place[0] in names and place not in held:
            raise DsimError(
                f"{path}: there is no {', '.join(place[1:])} in {place[0]}; results.csv lists what there is"
            )
