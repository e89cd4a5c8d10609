"""A sweep: worlds that differ in a few fields, each run once, and their table."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .. import __version__
from ..engine.allowed_code import allowed
from ..files.read import FilePath
from ..files.schema import stored
from ..files.write import csv_of
from ..report.html import result_files
from ..report.page import Page
from ..report.result import NOT_STORED, Result
from ..results.metrics import flat
from ..results.world import World
from .backend import Outcome, Pool
from .candidate import spelt
from .contents import Json, asked_of
from .grid import Plan, read_plan
from .memo import STORE, StoreFolder, store_kind
from .record import doubts_of, profile_notes

if TYPE_CHECKING:
    import pandas as pd

FILES = ("sweep.json", STORE, "results.csv", "report.html")


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
    doubted: tuple[str, ...] = ()  # of the best cell's steps, by its profiles
    results: tuple[Json, ...] = ()  # varied fields, metrics, error and key of the finished cells, in the plan's order
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
        from ..report.search_page import sweep_page

        return sweep_page(self)

    def to_frame(self) -> "pd.DataFrame":
        """results.csv: one row per finished cell."""
        import pandas as pd

        return pd.DataFrame(self.results)


SWEEP = store_kind("a sweep", Sweep.schema, FILES, "sweep.json")


def sweep(
    config: FilePath | Mapping[str, Any],
    out: FilePath | None = None,
    *,
    jobs: int | None = None,
    ray: str | None = None,
    force: bool = False,
    progress: Callable[[int, int], object] = lambda ended, total: None,
    command: str = "",
    allow_code: Iterable[FilePath] = (),
) -> Sweep:
    """Run every cell of a configuration (a TOML file or dictionary) and tabulate the results.

    out: a folder; a second sweep runs only its missing cells, unless `force`. jobs, ray: see `Pool`.
    progress: finished and all cells. command: for the report. allow_code: files that policies may name. Ctrl-C ends
    with the finished cells.
    """
    plan = read_plan(config, allowed(allow_code))
    profiles = [world.loaded_profile() for world in plan.services]
    begun = Sweep(
        title=plan.title,
        varied=plan.varied,
        num_cells=len(plan.cells),
        interrupted=True,
        estimated=tuple(dict.fromkeys(profile.name for profile in profiles if profile.is_estimate)),
        implementations=tuple(dict.fromkeys(profile.implementation for profile in profiles)),
        config=plan.config,
        command=command,
        notes=tuple(profile_notes(plan.services)),
        services=plan.services,
    )
    worlds = {cell.key: cell.world for cell in plan.cells}
    with StoreFolder(None if out is None else Path(out), SWEEP, force=force) as folder, Pool(jobs, ray) as pool:
        folder.begin()
        folder.put({"sweep.json": begun.to_text()})
        outcomes: dict[str, Outcome[Json]] = {}
        progress(0, len(worlds))
        with suppress(KeyboardInterrupt), closing(folder.memo.run(pool, _run, worlds, asked_of)) as running:
            for outcome in running:
                outcomes[outcome.key] = outcome
                progress(len(outcomes), len(worlds))
        done = replace(
            begun,
            interrupted=len(outcomes) < len(worlds),
            results=_rows(plan, outcomes),
            num_reused=sum(outcome.is_stored for outcome in outcomes.values()),
        )
        stable = [row for row in done.results if row.get("stable")]
        if stable:
            best = worlds[max(stable, key=lambda row: row.get("goodput") or row["output_throughput"])["key"]]
            done = replace(done, doubted=doubts_of(best, best.requests()))
        if folder.folder is not None and outcomes:
            cells = [[spelt(v) if isinstance(v, bool) else v for v in row.values()] for row in done.results]
            folder.put({"results.csv": csv_of([list(done.results[0]), *cells]), **result_files(done)})
    return done


def _run(world: World) -> Json:
    return world.run().to_json()


def _rows(plan: Plan, outcomes: Mapping[str, Outcome[Json]]) -> tuple[Json, ...]:
    """Varied fields, metrics, error and key; None if missing."""
    rows: list[Json] = []
    for cell in plan.cells:
        if (outcome := outcomes.get(cell.key)) is None:
            continue
        row = dict(cell.varied)
        if any(name.startswith("policy.") for name in plan.varied):
            row["spec"] = cell.world.policy
        rows.append(row | stored(flat(outcome.value or {})) | {"error": outcome.error, "key": cell.key})
    names = [name for name in dict.fromkeys(n for row in rows for n in row) if name not in ("error", "key")]
    # An SLO has one kind of verdict.
    names = [name for name in names if "=" not in name or any(row.get(name) is not None for row in rows)]
    return tuple({name: row.get(name) for name in (*names, "error", "key")} for row in rows)
