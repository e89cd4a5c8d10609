"""Validation: profile a model on a device, predict policies at loads, serve them, compare.

A cell (a policy at a load) is a predicted and a measured run folder, written as it ends, so an interrupted validation
continues. A load is a share of the smallest predicted capacity; its policies share the traffic, so that their ranking
can be judged.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comparison.bounds import Bound
from ..comparison.cells import Comparison, compare_runs
from ..comparison.compared import Compared
from ..engine.allowed_code import AllowedCode
from ..engine.errors import DsimError
from ..engine.plain import Positive
from ..engine.policy import PRESETS
from ..engine.state import COMPLETED
from ..files.place import hold_folder
from ..files.read import read_json, shown
from ..files.schema import FileObject
from ..files.write import write_whole
from ..planner.backend import Pool
from ..planner.contents import asked_of
from ..planner.memo import Memo
from ..planner.record import record
from ..report.page import Figure, Page
from ..report.shown import Showable
from ..results.run import Run, read_run
from ..results.scenario import Scenario
from ..sim.twin import Append, Progress, Result
from ..traces import Trace
from .on_device import LiveSetting

if TYPE_CHECKING:
    import pandas as pd

LOADS = (0.3, 0.6, 0.8)
POLICIES = ("ar", "lmdeploy-bd32", "chunk:8", "optimus")
PLAN = "validation.json"
FEWEST = 8  # requests of a cell

Steps = tuple[Mapping[str, Any], Mapping[str, Any]]  # a batch of a journal

Work = tuple[Path, Scenario, Trace]  # a cell's folder, scenario and requests


@dataclass(frozen=True)
class Cell:
    """A policy at a load. `again`: measured twice, for the noise floor."""

    policy: str
    load: float  # of the predicted capacity
    rate: float  # req/s
    num_requests: Positive
    again: bool = False

    @property
    def name(self) -> str:
        """Of its folder."""
        plain = "".join(c if c.isalnum() or c in ".-" else "_" for c in self.policy)
        return f"{plain}-at-{self.load:g}"


# A cell's run on the device, its expected s, those of the runs after it, and the policy.
Watch = Callable[[Cell, float, float, str], AbstractContextManager[Progress | None]]


@dataclass(frozen=True, repr=False)
class Validated(Showable):
    capacities: dict[str, float]  # predicted, req/s, by policy
    cells: list[Cell]
    comparison: Comparison  # all measured cells
    noise: Comparison | None  # repeated measurements: no twin can do better
    pairs: list[tuple[Run, Run]]  # compared
    left: list[str]  # cells without a measurement

    def to_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        noise = None if self.noise is None else self.noise.to_json()
        return {
            "capacities": self.capacities, "cells": [asdict(cell) for cell in self.cells], "left": self.left,
            "comparison": self.comparison.to_json(), "noise": noise,
        }  # fmt: skip

    def page(self) -> Page:
        return self._compared.page()

    def figures(self) -> list[Figure]:
        return self._compared.figures()

    def to_frame(self) -> pd.DataFrame:
        """A row a policy, load and metric."""
        return self._compared.to_frame()

    @property
    def _compared(self) -> Compared:
        return Compared(self.comparison, self.pairs)

    def noise_lines(self) -> list[str]:
        """How much two runs of a cell differ."""
        if self.noise is None:
            return ["Noise floor: no cell was measured twice"]
        lines = []
        for cell in self.noise.cells:
            means = [f"{name} {100 * cell.metrics[name].error['mean']:+.1f} %" for name in ("e2el", "tpot", "ttft")]
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


def predicted_capacity(scenario: Scenario) -> float:
    """req/s of the twin under constant demand."""
    requests = scenario.requests()
    result = replace(scenario, concurrency=max(1, len(requests) // 2)).simulate_whole(requests)
    return float((result.table["status"] == 0).sum()) / result.end


def _capacities(base: Scenario, policies: Sequence[str], memo: Memo, pool: Pool) -> dict[str, float]:
    """By policy, without EOS: ends are not known before."""
    whole = [replace(base, arrival="trace", eos=False, policy=policy) for policy in policies]
    return dict(zip(policies, memo.map(pool, _capacity, whole), strict=True))


def _capacity(memo: Memo, own: Scenario) -> float:
    return float(memo.replay(partial(asked_of, own, of="capacity"), partial(predicted_capacity, own)))


def plan_cells(capacities: dict[str, float], loads: Sequence[float], seconds: float) -> list[Cell]:
    """Most telling first: all policies at the middle load (twice), at the highest, then the others.

    seconds: of a cell's arrivals.
    """
    slowest, least = min(capacities.items(), key=lambda item: item[1])
    if not least > 0:
        raise DsimError(
            f"{slowest} is predicted to serve {least:g} req/s: none of the requests fits, try other --lengths"
        )
    order = sorted(loads, key=lambda load: (abs(load - sorted(loads)[len(loads) // 2]), -load))
    cells = []
    for load in order:
        rate = load * least
        num = max(FEWEST, math.ceil(rate * seconds))
        cells += [Cell(policy, load, rate, num, load == order[0]) for policy in capacities]
    return cells


def least_time(
    base: Scenario, policies: Sequence[str], loads: Sequence[float], memo: Memo, pool: Pool | None = None
) -> float:
    """s in which the fewest requests of all cells arrive."""
    cells = plan_cells(_capacities(base, policies, memo, pool or Pool(jobs=1)), loads, 0.0)
    return sum(cell.num_requests / cell.rate * (2 if cell.again else 1) for cell in cells)


def validate(
    out: Path,
    base: Scenario,
    live: LiveSetting,
    *,
    policies: Sequence[str] = POLICIES,
    loads: Sequence[float] = LOADS,
    seconds: float = 20.0,
    bounds: Sequence[Bound] = (),
    more: Callable[[], bool] = lambda: True,
    watch: Watch = lambda cell, seconds, later, policy: nullcontext(),
    memo: Memo | None = None,
    pool: Pool | None = None,
) -> Validated:
    """Measure every cell and compare; `base` has trace, profile file, workload and seed.

    If an EOS ends requests, a cell is measured first and the twin gets their ends. Cells with folders in `out` are not
    measured again. more: asked before each measured cell but the first; False leaves the rest. pool: of the twin's
    replays, default this process. DsimError before measuring if settings cannot run.
    """
    profile = live.profile
    assert profile is not None  # the twin has one
    for policy in policies:
        live.check(replace(base, policy=policy))
    memo, pool = memo or Memo(), pool or Pool(jobs=1)
    asked = {
        "trace": base.trace, "lengths": base.lengths, "seed": base.seed, "commits": live.commits,
        "eos": base.ends_at_eos,
    }  # fmt: skip
    held = _plan(out)
    if held is None:
        capacities = _capacities(base, policies, memo, pool)
        cells = plan_cells(capacities, loads, seconds)
        found = {"profile": base.profile, "capacities": capacities, "cells": [asdict(cell) for cell in cells]}
        hold_folder(out).close()
        write_whole(out / PLAN, json.dumps(asked | found, indent=2) + "\n")
    else:
        capacities, cells = held.get("capacities", dict[str, float]), held.get("cells", list[Cell])
        if set(capacities) != set(policies):
            raise DsimError(
                f"{out}: holds a validation of {', '.join(capacities)}, this one is of {', '.join(policies)}"
            )
        for key, wanted in asked.items():
            if held.values[key] != wanted:
                raise DsimError(
                    f"{out}: holds a validation with {key} {shown(held.values[key])}, this one has {wanted}"
                )
    about = live.about()
    left = []
    any_measured = any((out / cell.name / "measured").is_dir() for cell in cells)
    scenarios = [
        replace(base, policy=cell.policy, arrival="poisson", rate=cell.rate, num_requests=cell.num_requests)
        for cell in cells
    ]
    work = [(out / cell.name, scenario, scenario.requests()) for cell, scenario in zip(cells, scenarios, strict=True)]
    if not base.ends_at_eos:
        _predict(work, pool)
    pool.leave()  # nothing else runs during measurements
    runs = [
        (cell, scenario, requests, folder / name)
        for cell, (folder, scenario, requests) in zip(cells, work, strict=True)
        for name in (("measured", "again") if cell.again else ("measured",))
        if not _is_whole(folder / name)
    ]
    expected = [_expected(folder.with_name("predicted"), requests) for _, _, requests, folder in runs]
    for i, (cell, scenario, requests, folder) in enumerate(runs):
        if any_measured and not more():
            left.append(f"{cell.name}/{folder.name}")
            continue
        watched = partial(watch, cell, expected[i], sum(expected[i + 1 :]))
        recorded = record([scenario], requests, live.serve, out=folder, about=about, watch=watched)
        if recorded.failure is not None:
            raise recorded.failure
        if recorded.interrupted:  # half a cell
            shutil.rmtree(folder)
            raise KeyboardInterrupt
        any_measured = True
    if base.ends_at_eos:
        _predict([_ended(*cell) for cell in work if _is_whole(cell[0] / "measured")], pool)
    measured = _pairs(out, cells, "predicted", "measured", base.allow_code)
    repeated = _pairs(out, [cell for cell in cells if cell.again], "measured", "again", base.allow_code)
    comparison = compare_runs(measured, lambda _: profile, bounds)
    noise = compare_runs(repeated, lambda _: profile) if repeated else None
    return Validated(capacities, cells, comparison, noise, measured, left)


def _predict(work: Sequence[Work], pool: Pool) -> None:
    """Replay the cells that lack a prediction."""
    left = [cell for cell in work if not _is_whole(cell[0] / "predicted")]
    replays = pool.map(_replayed, [(scenario, requests) for _, scenario, requests in left])
    for (folder, scenario, requests), (found, steps) in zip(left, replays, strict=True):
        result = Result(scenario.setting().policy, **found)
        record([scenario], requests, partial(_recorded, result, steps), out=folder / "predicted")


def _replayed(cell: tuple[Scenario, Trace]) -> tuple[dict[str, Any], list[Steps]]:
    """In any process: a result without policy, and its steps."""
    scenario, requests = cell
    steps: list[Steps] = []
    result = scenario.simulate(requests, append=lambda columns, lists: steps.append((columns, lists)))
    if result.interrupted:
        raise KeyboardInterrupt
    return {f.name: getattr(result, f.name) for f in fields(result) if f.name != "policy"}, steps


def _recorded(
    result: Result, steps: Sequence[Steps], _scenario: Scenario, _requests: Trace, append: Append | None, _: object
) -> tuple[Result, None]:
    """As if served: it was replayed already."""
    for columns, lists in steps:
        if append is not None:
            append(columns, lists)
    return result, None


def _ended(folder: Path, scenario: Scenario, requests: Trace) -> Work:
    """A cell whose requests have their measured answers: only the weights know where an EOS is.

    Schedulers keep the original limit.
    """
    found = read_run(folder / "measured").requests(scenario.policy)
    done = found["status"] == COMPLETED
    answers = requests.output_length.copy()
    answers[found["request"][done]] = found["num_tokens"][done]
    extras = {**requests.extras, "max_tokens": requests.limit.tolist()}
    return folder, scenario, replace(requests, output_length=answers, extras=extras)


def _expected(predicted: Path, requests: Trace) -> float:
    """s that a run takes by its prediction, or until its last arrival."""
    if not predicted.is_dir():
        return float(requests.arrival[-1])
    run = read_run(predicted)
    return float(np.nanmax(run.requests(run.policies[0], ["finish"])["finish"]))


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
    keys = ("trace", "lengths", "profile", "seed", "commits", "eos", "capacities", "cells")
    return FileObject(str(path), "", read_json(path), keys)


def _is_whole(folder: Path) -> bool:
    """An interrupted run is removed, to be run again."""
    if not folder.is_dir():
        return False
    if read_run(folder).info.get("interrupted"):
        shutil.rmtree(folder)
        return False
    return True
