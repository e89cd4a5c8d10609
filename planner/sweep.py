"""A sweep: worlds that differ in a few fields, each run once, and their table."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .. import __version__
from ..engine.allowed_code import allowed
from ..files.place import FolderKind
from ..files.read import cut
from ..files.write import csv_of
from ..report.page import Page
from ..report.result import NOT_STORED, Result
from ..results.metrics import flat, no_nan
from ..results.spread import Uncertain
from ..results.world import World
from .backend import Outcome, Pool
from .candidate import spelt
from .contents import Json, asked_of
from .ensemble import check_num
from .ensemble import ensemble as run_ensemble
from .grid import Plan, read_plan
from .memo import FILES as STORE_FILES
from .memo import STORE, Memo, StoreFolder
from .record import doubts_of, profile_notes

if TYPE_CHECKING:
    import pandas as pd

Quality = Callable[[World], float | None]

FILES = ("sweep.json", STORE, "results.parquet", "results.csv", "report.html")
MOST_ASKED = 3  # cells under drawn profiles


@dataclass(frozen=True, kw_only=True, repr=False)
class Sweep(Result):
    """A sweep's finished cells."""

    schema: ClassVar[str] = "dsim-sweep"

    title: str
    varied: tuple[str, ...]
    num_cells: int  # of the whole sweep
    interrupted: bool  # cells are missing
    estimated: tuple[str, ...]  # profiles not measured
    implementations: tuple[str, ...]  # that price the cells
    config: Json  # as given
    command: str
    dsim: str = __version__
    notes: tuple[str, ...] = ()  # on profiles
    results: tuple[Json, ...] = ()  # varied fields, metrics, error and key of the finished cells, in the plan's order
    ensemble: Uncertain | None = None  # of the best cells
    doubted: tuple[str, ...] = ()  # of the best cell's steps, by its profiles
    num_reused: int = field(default=0, metadata=NOT_STORED)  # by an earlier run into the folder
    services: tuple[World, ...] = field(default=(), metadata=NOT_STORED)  # see Plan

    @property
    def num_run(self) -> int:
        return len(self.results) - self.num_reused

    @property
    def num_failed(self) -> int:
        return sum(row["error"] is not None for row in self.results)

    @property
    def num_unstable(self) -> int:
        return sum(row.get("stable") is False for row in self.results)

    def page(self) -> Page:
        from ..report.search import sweep_page

        return sweep_page(self)

    def to_frame(self) -> "pd.DataFrame":
        """results.parquet: one row per finished cell."""
        return _arrow(self.results).to_pandas()  # type: ignore[no-any-return]


SWEEP = FolderKind("a sweep", (*FILES, *STORE_FILES), "sweep.json", Sweep.schema, store=STORE)


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
    quality: scores a world. progress: finished and all cells. command: for the report. allow_code: files that
    policies may name. ensemble: draws of the profile for the best stable cells; asking: finished and all draws. Ctrl-C
    ends with the finished cells.
    """
    plan = read_plan(config, allowed(allow_code))
    check_num(ensemble, (cell.world for cell in plan.cells))
    profiles = [world.loaded_profile() for world in plan.services]
    begun = Sweep(
        title=plan.title, varied=plan.varied, num_cells=len(plan.cells), interrupted=True,
        estimated=tuple(dict.fromkeys(profile.name for profile in profiles if profile.is_estimate)),
        implementations=tuple(dict.fromkeys(profile.implementation for profile in profiles)), config=plan.config,
        command=command, notes=tuple(profile_notes(plan.services)), services=plan.services,
    )  # fmt: skip
    with StoreFolder(None if out is None else Path(out), SWEEP, force=force) as folder, Pool(jobs, ray) as pool:
        folder.begin()
        folder.put({"sweep.json": begun.to_text()})
        outcomes, interrupted = folder.finish(
            pool, _run, {cell.key: cell.world for cell in plan.cells},
            progress=lambda ended, total, _: progress and progress(ended, total),
        )  # fmt: skip
        uncertain = None
        metric, best = _best_cells(plan, outcomes)
        if ensemble is not None and best and not interrupted:
            with suppress(KeyboardInterrupt):
                uncertain = run_ensemble(
                    best, None, ensemble, judged=(metric, True), pool=pool, progress=asking, memo=folder.memo
                )
        done = replace(
            begun, interrupted=interrupted, results=_rows(plan, outcomes, quality), ensemble=uncertain,
            doubted=next((doubts_of(cell, cell.requests()) for cell in best.values()), ()),
            num_reused=sum(outcome.is_stored for outcome in outcomes.values()),
        )  # fmt: skip
        if folder.folder is not None and outcomes:
            _write(folder, done)
    return done


def _run(memo: Memo, world: World) -> Json:
    summary: Json = memo.replay(lambda: asked_of(world, of="summary"), lambda: world.run().to_json())
    return summary


def _best_cells(plan: Plan, outcomes: Mapping[str, Outcome[Json]]) -> tuple[str, dict[str, World]]:
    """The deciding metric and the best stable cells, the best first; of cells that differ in seed alone, one."""
    summaries = {key: outcome.value or {} for key, outcome in outcomes.items()}
    metric = "goodput" if any(summary.get("goodput") for summary in summaries.values()) else "output_throughput"
    values: dict[str, float] = {}
    worlds: dict[str, World] = {}
    for cell in plan.cells:
        summary = summaries.get(cell.key, {})
        name = ", ".join(f"{n}={cut(v, 40)}" for n, v in cell.varied.items() if n != "seed") or plan.title
        if summary.get("stable") and summary.get(metric) is not None and name not in values:
            values[name], worlds[name] = float(summary[metric]), cell.world
    return metric, {name: worlds[name] for name in sorted(values, key=lambda name: -values[name])[:MOST_ASKED]}


def _write(folder: StoreFolder, done: Sweep) -> None:
    """Each file whole or not at all; the same cells give the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ..report.html import result_files

    parquet = pa.BufferOutputStream()
    pq.write_table(_arrow(done.results), parquet, compression="zstd")
    columns = list(done.results[0])
    rows = [
        [spelt(row[name]) if isinstance(row[name], bool) else row[name] for name in columns] for row in done.results
    ]
    folder.put({
        "results.csv": csv_of([columns, *rows]),
        "results.parquet": parquet.getvalue().to_pybytes(),
        **result_files(done),
    })  # fmt: skip


# The table


def _rows(plan: Plan, outcomes: Mapping[str, Outcome[Json]], quality: Quality | None) -> tuple[Json, ...]:
    """Varied fields, metrics, error and key; None if missing."""
    cells = [cell for cell in plan.cells if cell.key in outcomes]
    rows: list[Json] = []
    for cell in cells:
        outcome = outcomes[cell.key]
        row = dict(cell.varied)
        if any(name.startswith("policy.") for name in plan.varied):
            row["spec"] = cell.world.policy
        row |= no_nan(flat(outcome.value or {}))
        if quality is not None:
            row["quality"] = quality(cell.world)
        rows.append(row | {"error": outcome.error, "key": cell.key})
    names = [name for name in dict.fromkeys(n for row in rows for n in row) if name not in ("quality", "error", "key")]
    columns = {name: [row.get(name) for row in rows] for name in [*names, "quality", "error", "key"]}
    # An SLO has one kind of verdict.
    unused = {name for name, values in columns.items() if "=" in name and all(value is None for value in values)}
    if quality is None:
        unused.add("quality")
    columns = {name: _alike(values) for name, values in columns.items() if name not in unused}
    return tuple(dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _alike(values: list[Any]) -> list[Any]:
    """One type: integers and floats become numbers, other mixtures text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2:
        return values
    convert: Callable[[Any], Any] = float if kinds == {int, float} else spelt
    return [None if value is None else convert(value) for value in values]


def _arrow(rows: tuple[Json, ...]) -> Any:
    import pyarrow as pa

    arrays = {name: pa.array([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    for name, array in arrays.items():
        if array.type == pa.null():
            arrays[name] = array.cast(pa.string() if name == "error" else pa.float64())
    return pa.table(arrays)
