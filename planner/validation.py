"""Validation: profile a model on a device, predict policies at loads, serve them, compare.

A cell (a policy at a load) is a predicted and a measured run folder, written as it ends, so an interrupted validation
continues. A load is a number of requests in flight, in which all policies serve the same requests, so that their
ranking can be judged, or a share of the policy's predicted capacity.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..comparison.bounds import Bound
from ..comparison.comparison import Comparison, compare_runs
from ..comparison.comparison_page import signed
from ..engine.allowed_code import AllowedCode
from ..engine.errors import DsimError
from ..engine.plain import Positive
from ..engine.spec import PRESETS
from ..files.place import hold_folder
from ..files.read import quoted, read_json, shown
from ..files.schema import FileObject
from ..files.write import write_whole
from ..report.page import Page
from ..report.result import Result
from ..results.on_device import LiveSetting
from ..results.run import Run, read_run
from ..results.world import World
from ..sim.twin import Progress
from ..traces import Trace
from .record import in_twin, record

if TYPE_CHECKING:
    import pandas as pd

FULL = "full"  # as many requests in flight as the largest batch has
LOADS = ("64", FULL, "0.6", "16", "0.8", "0.3")  # most telling first
POLICIES = ("ar", "lmdeploy-bd32", "chunk:8", "optimus")
PLAN = "validation.json"
# Requests of a cell; where ttft is bounded: of 11 to 15 the arrivals' phase alone moves a mean ttft by 4 to 7 %.
FEWEST, FEWEST_OF_TTFT = 30, 100


@dataclass(frozen=True)
class Cell:
    """A policy at a load. `again`: measured twice, for the noise floor."""

    policy: str
    load: str
    concurrency: int | None  # requests in flight; None: an open loop
    rate: float  # req/s: an open loop's arrivals, a closed loop's predicted throughput
    num_requests: Positive
    again: bool = False

    @property
    def name(self) -> str:
        """Of its folder."""
        return re.sub(r"[^\w.-]", "_", f"{self.policy}-at-{self.load}")

    @property
    def seconds(self) -> float:
        """About how long a run of it takes."""
        return self.num_requests / self.rate


Watch = Callable[[Cell, str], AbstractContextManager[Progress | None]]  # of a cell's and policy's run on the device


@dataclass(frozen=True, repr=False)
class Validated(Result):
    """All measured cells, compared."""

    schema: ClassVar[str] = "dsim-validation"

    capacities: Mapping[str, float]  # predicted, req/s, by policy
    cells: tuple[Cell, ...]
    unmeasured: tuple[str, ...]  # runs
    comparison: Comparison
    noise: Comparison | None  # repeated measurements: no twin can do better

    def page(self) -> Page:
        page = self.comparison.page()
        return replace(page, notes=(*page.notes, *self._noise_lines()))

    def to_frame(self) -> pd.DataFrame:
        """As of a comparison."""
        return self.comparison.to_frame()

    def _noise_lines(self) -> list[str]:
        """How much two runs of a cell differ."""
        lines: list[str] = []
        if self.noise is None:
            return lines
        for cell in self.noise.cells:
            means = [f"{name} {signed(cell.metrics[name].error['mean'])}" for name in ("e2el", "tpot", "ttft")]
            lines.append(f"Noise floor, {cell.policy}: means of two runs on the device differ by {', '.join(means)}")
        return lines


def canvas_policies(canvas_length: int) -> list[str]:
    """Presets for canvases of this length."""
    from ..engine.policies.canvas import Canvas

    kinds = {name: preset.policy.granularity for name, preset in PRESETS.items()}
    return [
        name if kind.canvas_length == canvas_length else f"{name},canvas_length={canvas_length}"
        for name, kind in kinds.items()
        if isinstance(kind, Canvas)
    ]


def load_of(text: str | float) -> str:
    """A load as a cell names it; DsimError unless it is a share, a number of requests in flight, or `full`."""
    if text == FULL:
        return FULL
    with suppress(ValueError):
        load = float(text)
        if load > 0 and (load < 1 or load % 1 == 0):
            return f"{load:g}"
    raise DsimError(
        f"--load is {quoted(text)}, expected a share of capacity below 1, a number of requests in flight, or {FULL}"
    )


def predicted_throughput(world: World) -> float:
    """req/s of the twin under constant demand: with the world's requests in flight, or half of all."""
    requests = world.requests()
    half = max(1, len(requests) // 2)
    result = replace(world, concurrency=min(world.concurrency or half, half)).simulate_whole(requests)
    return float((result.table["status"] == 0).sum()) / result.end


def plan_cells(
    base: World, policies: Sequence[str], loads: Sequence[str], fewest: int
) -> tuple[dict[str, float], list[Cell]]:
    """Predicted capacities (req/s), and every cell with the fewest requests; the first load's are measured twice.

    A closed loop has no more requests in flight than the policy's largest batch.
    """
    worlds = [replace(base, arrival="trace", policy=policy) for policy in policies]
    capacities = {world.policy: predicted_throughput(world) for world in worlds}
    cells: dict[tuple[str, str | int], Cell] = {}
    for load in loads:
        share = float(load) if load != FULL else math.inf
        for world in worlds:
            concurrency, rate = None, share * capacities[world.policy]
            if share >= 1:
                concurrency = int(min(share, world.setting().limits.max_batch))
                rate = predicted_throughput(replace(world, concurrency=concurrency))
            num = max(fewest, 2 * (concurrency or 0))
            cell = Cell(world.policy, load, concurrency, rate, num_requests=num, again=load == loads[0])
            cells.setdefault((cell.policy, concurrency or load), cell)
    return capacities, list(cells.values())


def lengthen(cells: Sequence[Cell], seconds: float) -> list[Cell]:
    """Cells that take this much longer, or less; a load's policies all get as many more requests."""
    slowest = {cell.load: min(other.rate for other in cells if other.load == cell.load) for cell in cells}
    return [replace(cell, num_requests=cell.num_requests + int(slowest[cell.load] * seconds)) for cell in cells]


def runs_of(cells: Sequence[Cell]) -> list[tuple[Cell, str]]:
    """Cells with the name of the folder of a run, in order of importance."""
    first, again = ([(cell, name) for cell in cells if cell.again] for name in ("measured", "again"))
    return first + again + [(cell, "measured") for cell in cells if not cell.again]


def affordable(runs: Sequence[tuple[Cell, str]], within: float) -> tuple[list[tuple[Cell, str]], float]:
    """The most important runs that fit in `within` s together, and the s that they leave."""
    chosen = []
    for cell, name in runs:
        if cell.seconds <= within:
            chosen.append((cell, name))
            within -= cell.seconds
    return chosen, within


def validate(
    out: Path,
    base: World,
    live: LiveSetting,
    *,
    policies: Sequence[str],
    loads: Sequence[str],
    seconds: float | None = 0.0,
    within: float = math.inf,
    bounds: Sequence[Bound] = (),
    watch: Watch = lambda cell, policy: nullcontext(),
) -> Validated:
    """Measure every cell and compare; `base` has trace, profile file, workload and seed.

    Cells with folders in `out` are not measured again. within: s of all runs; those that do not fit are left, but for
    the first. seconds: of a cell, in addition to its fewest requests'; None: as `within` allows. DsimError before
    measuring if settings cannot run.
    """
    profile = live.profile
    assert profile is not None  # the twin has one
    for policy in policies:
        live.check(replace(base, policy=policy))
    fewest = FEWEST_OF_TTFT if any(bound.metric == "ttft" for bound in bounds) else FEWEST
    inputs = {
        "trace": base.trace,
        "lengths": base.lengths,
        "seed": base.seed,
        "commits": live.commits,
        "policies": ", ".join(sorted(policies)),
    }
    plan = _plan(out)
    if plan is None:
        capacities, cells = plan_cells(base, policies, loads, fewest)
        cells = lengthen(cells, _spare_seconds(cells, within) if seconds is None else seconds)
        planned = {"profile": base.profile, "capacities": capacities, "cells": [asdict(cell) for cell in cells]}
        hold_folder(out).close()
        write_whole(out / PLAN, json.dumps(inputs | planned, indent=2) + "\n")
    else:
        capacities, cells = plan.get("capacities", dict[str, float]), plan.get("cells", list[Cell])
        for key, value in inputs.items():
            if plan.values[key] != value:
                raise DsimError(f"{out}: holds a validation with {key} {shown(plan.values[key])}, this one has {value}")
        if (num := min(cell.num_requests for cell in cells)) < fewest:
            raise DsimError(f"{out}: holds cells of {num} requests, expected {fewest} or more for a bound of ttft")
    about = live.about()
    waiting = [(cell, name) for cell, name in runs_of(cells) if not _is_whole(out / cell.name / name)]
    chosen = affordable(waiting, within)[0] or waiting[:1]
    unmeasured = [f"{cell.name}/{name}" for cell, name in waiting if (cell, name) not in chosen]
    for cell in cells:
        if (out / cell.name / "measured").is_dir():
            _predicted(out / cell.name / "predicted", base, cell)
    work = {cell: _predicted(out / cell.name / "predicted", base, cell) for cell in dict.fromkeys(c for c, _ in chosen)}
    for cell, name in chosen:
        folder, (world, requests) = out / cell.name / name, work[cell]
        recorded = record([world], requests, live.serve, out=folder, about=about, watch=partial(watch, cell))
        if recorded.failure is not None:
            raise recorded.failure
        if recorded.interrupted:  # half a cell
            shutil.rmtree(folder)
            raise KeyboardInterrupt
    measured = _pairs(out, cells, "predicted", "measured", base.allow_code)
    repeated = _pairs(out, [cell for cell in cells if cell.again], "measured", "again", base.allow_code)
    noise = None
    if repeated:
        noise = compare_runs(repeated, lambda _: profile)
    return Validated(
        capacities,
        tuple(cells),
        tuple(unmeasured),
        comparison=compare_runs(measured, lambda _: profile, bounds),
        noise=noise,
    )


def _spare_seconds(cells: Sequence[Cell], within: float) -> float:
    """s that each affordable run may take longer."""
    chosen, spare = affordable(runs_of(cells), within)
    if not chosen:
        raise DsimError(
            f"{cells[0].policy} at load {cells[0].load} takes about {cells[0].seconds:.3g} s, and the budget "
            f"leaves {within:.3g} s for any cell: give a longer --budget, or other --policy or --load"
        )
    return spare / len(chosen)


def _predicted(folder: Path, base: World, cell: Cell) -> tuple[World, Trace]:
    """A cell's world and requests, replayed if it lacks a prediction. A closed loop ignores times of arrival."""
    world = replace(
        base,
        policy=cell.policy,
        num_requests=cell.num_requests,
        concurrency=cell.concurrency,
        arrival="poisson",
        rate=cell.rate,
    )
    requests = world.requests()
    if not _is_whole(folder) and record([world], requests, in_twin, out=folder).interrupted:
        raise KeyboardInterrupt
    return world, requests


def _pairs(
    out: Path, cells: Sequence[Cell], predicted: str, measured: str, allow_code: AllowedCode
) -> list[tuple[Run, Run]]:
    """The runs of cells that have both."""
    folders = [(out / cell.name / predicted, out / cell.name / measured) for cell in cells]
    return [(read_run(p, allow_code), read_run(m, allow_code)) for p, m in folders if _is_whole(m) and _is_whole(p)]


def _plan(out: Path) -> FileObject | None:
    """None in a new folder."""
    path = out / PLAN
    if not path.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise DsimError(f"{out}: holds files and no {PLAN}: choose another folder")
        return None
    keys = ("trace", "lengths", "profile", "seed", "commits", "policies", "capacities", "cells")
    return FileObject(str(path), "", read_json(path), keys)


def _is_whole(folder: Path) -> bool:
    """An interrupted run is removed, to be run again."""
    if not folder.is_dir():
        return False
    if read_run(folder).info.interrupted:
        shutil.rmtree(folder)
        return False
    return True
