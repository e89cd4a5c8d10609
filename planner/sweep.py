"""A sweep: scenarios that differ in a few fields, each run once, and their table."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..engine.allowed_code import allowed
from ..files.place import FolderKind, has_schema
from ..files.read import cut
from ..files.write import csv_of, write_whole
from ..report.page import Figure, Page, Section, table
from ..report.result import Result
from ..report.table import number
from ..results.metrics import flat, no_nan
from ..results.scenario import Scenario
from ..results.spread import Uncertain
from .backend import Outcome, Pool
from .contents import Json, asked_of
from .ensemble import check_num
from .ensemble import ensemble as run_ensemble
from .grid import Plan, read_plan
from .memo import FILES as STORE_FILES
from .memo import STORE, Memo, StoreFolder
from .record import profile_notes

if TYPE_CHECKING:
    import pandas as pd

    from ..report.sweep import Swept

Quality = Callable[[Scenario], float | None]

SCHEMA, VERSION = "dsim-sweep", 1
FILES = ("sweep.json", STORE, "results.parquet", "results.csv", "report.html")
MOST_ASKED = 3  # cells under drawn profiles
SWEEP = FolderKind("a sweep", (*FILES, *STORE_FILES), "sweep.json", has_schema(SCHEMA), kept=STORE)
# Shown by default.
BRIEF = (
    "goodput", "slo_attainment", "output_throughput", "ttft_ms_p50", "ttft_ms_p99", "e2el_ms_p99", "stable", "error"
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Sweep(Result):
    """A sweep's finished cells."""

    plan: Plan
    table: "pd.DataFrame"  # one row per finished cell, in the plan's order
    num_run: int
    num_reused: int  # by an earlier run into the folder
    interrupted: bool
    ensemble: Uncertain | None  # of the best cells; None: not asked for
    first: Mapping[str, Scenario]  # first finished cell by policy, profile and yield

    @property
    def num_cells(self) -> int:
        """Of the whole sweep."""
        return len(self.plan.cells)

    def page(self) -> Page:
        head = [n for n in (*self.plan.varied, *BRIEF) if n in self.table and self.table[n].notna().any()]
        rows = [[_cell(row[name]) for name in head] for row in self.to_json()["results"]]
        ended = ": interrupted" if self.interrupted else ""
        said = f"{self.plan.title}: {len(rows)} of {self.num_cells} cells{ended}"
        return Page(self.plan.title, said, said, sections=(Section("Cells", (table(head, rows),)),))

    def figures(self) -> list[Figure]:
        from ..report.sweep import sweep_page

        rows = no_nan(self.table.to_dict("list"))
        return sweep_page(_swept(self.plan, rows, self.interrupted)).figures

    def to_frame(self) -> "pd.DataFrame":
        """results.parquet: one row per finished cell."""
        return self.table

    def to_json(self) -> Json:
        """The object of `--json`."""
        rows: list[Json] = no_nan(self.table.to_dict("records"))
        told: Json = {} if self.ensemble is None else {"ensemble": no_nan(self.ensemble)}
        return told | {
            "title": self.plan.title,
            "num_cells": self.num_cells,
            "num_run": self.num_run,
            "num_reused": self.num_reused,
            "num_failed": int(self.table["error"].notna().sum()),
            "num_unstable": sum(row.get("stable") is False for row in rows),
            "estimated": list(self.plan.estimated),
            "interrupted": self.interrupted,
            "results": rows,
        }


def sweep(
    config: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    jobs: int | None = None,
    ray: str | None = None,
    force: bool = False,
    quality: Quality | None = None,
    progress: Callable[[int, int], None] | None = None,
    command: str = "",
    allow_code: Iterable[str | Path] = (),
    ensemble: int | None = None,
    asking: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Run every cell of a configuration (a TOML file or dictionary) and tabulate the results.

    out: a folder; a second sweep runs only its missing cells, unless `force`. jobs, ray: see `Pool`.
    quality: scores a scenario. progress: finished and all cells. command: for the report. allow_code: files that
    policies may name. ensemble: draws of the profile for the best stable cells; asking: finished and all draws. Ctrl-C
    ends with the finished cells.
    """
    plan = read_plan(config, allowed(allow_code))
    check_num(ensemble, (cell.scenario for cell in plan.cells))
    with (
        StoreFolder(None if out is None else Path(out), SWEEP, force=force) as folder,
        Pool(jobs, ray) as pool,
    ):
        memo = folder.memo

        def begin() -> None:
            if folder.folder is not None:
                write_whole(folder.folder / "sweep.json", _manifest(plan, False))

        finished = folder.finish(
            pool, _run, {cell.key: cell.scenario for cell in plan.cells}, begin=begin,
            progress=lambda ended, of, _: progress and progress(ended, of),
        )  # fmt: skip
        done = finished.outcomes
        interrupted = finished.interrupted
        columns = _columns(plan, done, quality)
        uncertain, first = None, _of_each_policy(plan, done)
        if ensemble is not None and not interrupted:
            with suppress(KeyboardInterrupt):
                uncertain = _under_drawn_profiles(plan, done, ensemble, pool, asking, memo)
        told = {(own.profile, own.workload, own.yields): own for own in first.values()}
        swept = _swept(plan, columns, interrupted, command, profile_notes(list(told.values())), uncertain)
        _write(folder, plan, columns, interrupted, swept)
    reused = finished.num_reused
    return Sweep(plan, _arrow(columns).to_pandas(), len(done) - reused, reused, interrupted, uncertain, first)


def _run(memo: Memo, scenario: Scenario) -> Json:
    found: Json = memo.replay(lambda: asked_of(scenario, of="summary"), lambda: scenario.run().to_json())
    return found


def _of_each_policy(plan: Plan, done: Mapping[str, Outcome[Json]]) -> dict[str, Scenario]:
    """The first finished cell by policy, trace, profile and yield."""
    first: dict[str, Scenario] = {}
    for cell in plan.cells:
        others = (str(cell.varied[name]) for name in ("trace", "profile", "workload", "yields") if name in cell.varied)
        if cell.key in done and done[cell.key].error is None:
            first.setdefault(", ".join([cell.scenario.label, *others]), cell.scenario)
    return first


def _under_drawn_profiles(
    plan: Plan, done: Mapping[str, Outcome[Json]], num: int, pool: Pool, progress: Callable[[int, int], None] | None,
    memo: Memo,
) -> Uncertain | None:  # fmt: skip
    """The best stable cells; of cells that differ in seed alone, one. None without any."""
    summaries = {key: outcome.value or {} for key, outcome in done.items()}
    metric = "goodput" if any(summary.get("goodput") for summary in summaries.values()) else "output_throughput"
    scored: dict[str, tuple[float, Scenario]] = {}
    for cell in plan.cells:
        summary = summaries.get(cell.key, {})
        value = summary.get(metric)
        if summary.get("stable") and value is not None:
            name = ", ".join(f"{field}={cut(at, 40)}" for field, at in cell.varied.items() if field != "seed")
            scored.setdefault(name or plan.title, (float(value), cell.scenario))
    best = sorted(scored, key=lambda name: -scored[name][0])[:MOST_ASKED]
    if not best:
        return None
    cells = {name: scored[name][1] for name in best}
    return run_ensemble(cells, None, num, judged=(metric, True), pool=pool, progress=progress, memo=memo)


def _write(
    folder: StoreFolder, plan: Plan, columns: Mapping[str, list[Any]], interrupted: bool, swept: "Swept"
) -> None:
    """Each file whole or not at all; the same cells give the same bytes."""
    if folder.folder is None or not folder.is_settled:
        return  # stopped before any cell finished
    # A sweep without a folder draws nothing.
    from ..report.html import to_html
    from ..report.sweep import sweep_page

    write_whole(folder.folder / "results.csv", _csv(columns))
    write_whole(folder.folder / "results.parquet", _parquet(columns))
    write_whole(folder.folder / "report.html", to_html(sweep_page(swept)))
    write_whole(folder.folder / "sweep.json", _manifest(plan, not interrupted))


def _facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    """The fields that all cells share, as configured, without folders."""
    base = plan.config.get("base", {})
    return tuple(
        (name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in base.items()
        if name not in plan.varied and not isinstance(value, Mapping)
    )


def _swept(
    plan: Plan, columns: Mapping[str, list[Any]], interrupted: bool, command: str = "",
    notes: Sequence[str] = (), ensemble: Uncertain | None = None,
) -> "Swept":  # fmt: skip
    from ..report.sweep import Swept

    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return Swept(
        plan.title, plan.varied, rows, len(plan.cells), plan.estimated, plan.implementations, interrupted,
        _facts(plan), command, __version__, tuple(notes), ensemble,
    )  # fmt: skip


def _manifest(plan: Plan, complete: bool) -> bytes:
    info = {
        "schema": SCHEMA, "version": VERSION, "dsim": __version__, "title": plan.title, "varied": plan.varied,
        "cells": [cell.key for cell in plan.cells], "estimated": plan.estimated, "complete": complete,
        "config": plan.config,
    }  # fmt: skip
    return (json.dumps(info, indent=2, ensure_ascii=False, default=str) + "\n").encode()


# The table


def _columns(plan: Plan, done: Mapping[str, Outcome[Json]], quality: Quality | None) -> dict[str, list[Any]]:
    """By column: varied fields, metrics, error; None if missing."""
    cells = [cell for cell in plan.cells if cell.key in done]
    metrics = [flat(done[cell.key].value or {}) for cell in cells]
    out: dict[str, list[Any]] = {name: [cell.varied.get(name) for cell in cells] for name in plan.varied}
    if any(name.startswith("policy.") for name in plan.varied):
        out["spec"] = [cell.scenario.policy for cell in cells]
    for name in dict.fromkeys(name for own in metrics for name in own):
        values = [own.get(name) for own in metrics]
        if "=" not in name or any(value is not None for value in values):  # an SLO has one kind of verdict
            out[name] = values
    if quality is not None:
        out["quality"] = [quality(cell.scenario) for cell in cells]
    out["error"] = [done[cell.key].error for cell in cells]
    out["key"] = [cell.key for cell in cells]
    return {name: _alike(values) for name, values in out.items()}


def _alike(values: list[Any]) -> list[Any]:
    """One type: integers and floats become numbers, other mixtures text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2:
        return values
    to: Callable[[Any], Any] = float if kinds == {int, float} else _text
    return [None if value is None else to(value) for value in values]


def _cell(value: Any) -> str:
    """As shown."""
    return number(value) if isinstance(value, float) else _text(value)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _csv(columns: Mapping[str, list[Any]]) -> bytes:
    written = ([_text(v) for v in values] if bool in map(type, values) else values for values in columns.values())
    return csv_of([columns, *zip(*written, strict=True)]).encode()


def _parquet(columns: Mapping[str, list[Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(_arrow(columns), sink, compression="zstd")
    return bytes(sink.getvalue().to_pybytes())


def _arrow(columns: Mapping[str, list[Any]]) -> Any:
    import pyarrow as pa

    kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    arrays = {}
    for name, values in columns.items():
        kind = next((type(value) for value in values if value is not None), str if name == "error" else float)
        arrays[name] = pa.array(values, kinds[kind])
    return pa.table(arrays)
