"""A close-up of a journal: rows of steps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..engine.step import Phase
from ..results.run import Run
from .chart import Chart
from .page import Figure

NUM_STEPS = 120  # drawn
MAX_LANES = 64  # rows of a step
LANE = 9  # pixels

PHASES = {
    Phase.PREFILL: ("prefill", "#D55E00"),
    Phase.DENOISE: ("denoise", "#0072B2"),
    Phase.FLUSH: ("keys of committed tokens (commit, encode)", "#009E73"),
    Phase.IDLE: ("ended already, computed for nothing", "#9aa0a6"),
    Phase.FULL: ("full pass", "#CC79A7"),
    Phase.PACK: ("full pass, keys chosen", "#E69F00"),
    Phase.REUSE: ("reuse", "#56B4E9"),
    Phase.REFRESH_RESPONSE: ("refresh the response", "#009E73"),
    Phase.REFRESH_PROMPT: ("refresh the prompt", "#D55E00"),
    Phase.PARTIAL: ("refresh what changed", "#0072B2"),
}


@dataclass(frozen=True)
class DrawnRow:
    """A request in a step."""

    start: float  # s
    end: float  # s
    replica: int
    step: int
    request: int
    phase: Phase
    num_tokens: int  # computed
    commits: int  # bit mask

    @property
    def num_committed(self) -> int:
        return self.commits.bit_count()


def step_rows(run: Run, policy: str, begin: float) -> Iterator[DrawnRow]:
    """Rows of steps that end after `begin` (s); none without lists in the journal."""
    for columns, lists in run.step_groups(policy, [(begin, math.inf)]):
        requests, offsets = lists["requests"]
        start, end = columns["start"], columns["start"] + columns["latency"]
        step_of_row = np.repeat(np.arange(len(start)), np.diff(offsets))
        words = lists["commits"][0].reshape(len(requests), -1)
        for at in np.flatnonzero(end[step_of_row] > begin):
            i = step_of_row[at]
            yield DrawnRow(
                float(start[i]), float(end[i]), int(columns["replica"][i]), int(columns["step"][i]),
                int(requests[at]), Phase(int(lists["phases"][0][at])), int(lists["num_tokens"][0][at]),
                sum(int(word) << (64 * k) for k, word in enumerate(words[at])),
            )  # fmt: skip


def engine_figure(run: Run, policy: str, index: int, at: float, why: str) -> Figure | None:
    """NUM_STEPS steps of a replica from `at` (s) on, coloured by phase."""
    found: list[DrawnRow] = []
    for row in step_rows(run, policy, at):
        first = found[0] if found else row
        if row.replica == first.replica and row.step >= first.step + NUM_STEPS:
            break
        if row.replica == first.replica:
            found.append(row)
    if not found:
        return None
    lanes = _lanes(found)
    shown = [row for row in found if lanes[row.request] < MAX_LANES]
    begin = min(row.start for row in found)
    height = 90 + LANE * (1 + max(lanes[row.request] for row in shown))
    chart = Chart(f"seconds after {begin:,.2f} s", "rows", height=max(190, height), legend=True)
    flushed = {(row.request, row.step) for row in shown if row.phase == Phase.FLUSH}
    for phase, (name, ink) in PHASES.items():
        mine = [row for row in shown if row.phase == phase]
        if not mine:
            continue
        computed = [max(1, row.num_tokens) for row in mine]
        # Darker: more of the computed positions commit. A repeated pass over committed tokens (the row waits for other
        # blocks) is pale.
        share = [row.num_committed / num for row, num in zip(mine, computed, strict=True)]
        if phase == Phase.FLUSH:
            share = [0.0 if (row.request, row.step - 1) in flushed else 1.0 for row in mine]
        depth = [1.0 if phase in (Phase.PREFILL, Phase.IDLE) else 0.35 + 0.65 * min(1.0, 2 * s) for s in share]
        chart.add(
            "bar", orientation="h", name=name, width=0.8, y=[lanes[row.request] for row in mine],
            base=[row.start - begin for row in mine], x=[0.94 * (row.end - row.start) for row in mine],
            marker={"color": ink, "opacity": [round(d, 2) for d in depth], "line": {"width": 0}},
            customdata=[[row.request, row.step, row.num_tokens, row.num_committed] for row in mine],
            hovertemplate="request %{customdata[0]}, step %{customdata[1]}: " + name
            + ", %{customdata[2]} computed, %{customdata[3]} committed<extra></extra>",
        )  # fmt: skip
    chart.layout |= {"barmode": "overlay", "bargap": 0}
    chart.y |= {"autorange": "reversed", "showticklabels": False, "ticks": "", "showgrid": False}
    left_out = len(lanes) - len({row.request for row in shown})
    num_steps = len({row.step for row in found})
    caption = (
        f"{num_steps} steps of replica {found[0].replica} from {begin:,.1f} s on, {why}. Each bar is a row in a step, "
        "darker the larger the share of its positions that it commits; pale green: it waits for others' blocks. "
        "Drag to zoom, double-click to reset."
    )
    if left_out:
        caption += f" {left_out} requests beyond {MAX_LANES} rows are left out."
    return Figure(f"engine-{index}", policy, caption, chart, wide=True)


def _lanes(found: Sequence[DrawnRow]) -> dict[int, int]:
    """The lowest free lane, from a request's first step to its last."""
    last = {row.request: row.step for row in found}
    lanes: dict[int, int] = {}
    busy: dict[int, int] = {}  # lane -> last step
    for row in found:
        if row.request not in lanes:
            lane = next(k for k in range(len(busy) + 1) if busy.get(k, -1) < row.step)
            lanes[row.request], busy[lane] = lane, last[row.request]
    return lanes


def slowest(values: "npt.NDArray[np.float64]", num: int) -> list[int]:
    """Rows of the greatest values, descending, without NaN."""
    order = np.argsort(-values, kind="stable")
    return [int(i) for i in order[:num] if not math.isnan(values[i])]
