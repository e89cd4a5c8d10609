"""Close-ups of a journal: what the engine did step by step, and what became of single requests."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.step import Phase
from ..results.run import Columns, Run
from .chart import Chart
from .page import Figure

NUM_STEPS = 120  # that are drawn
MAX_LANES = 64  # rows of a step that are drawn
LANE = 9  # pixels
NEAR = 1e-6  # s: two readings of one clock

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
class Part:
    """One request's part in one step."""

    start: float  # s
    end: float  # s
    replica: int
    step: int
    request: int
    phase: Phase
    num_tokens: int  # positions computed
    commits: int  # bit mask of the positions committed

    @property
    def num_committed(self) -> int:
        """Positions committed."""
        return self.commits.bit_count()


def parts(
    run: Run, policy: str, spans: Sequence[tuple[float, float]], of: Collection[int] | None = None
) -> Iterator[Part]:  # fmt: skip
    """The rows of the steps that meet one of these stretches of time (s), `of` these requests or of all.

    Nothing where the journal keeps no rows.
    """
    for columns, lists in run.step_groups(policy, spans):
        requests, offsets = lists["requests"]
        start, end = columns["start"], columns["start"] + columns["latency"]
        step_of_row = np.repeat(np.arange(len(start)), np.diff(offsets))
        meets = np.zeros(len(start), np.bool_)
        for low, high in spans:
            meets |= (end > low) & (start < high)
        wanted = meets[step_of_row]
        if of is not None:
            wanted &= np.isin(requests, list(of))
        words = lists["commits"][0].reshape(len(requests), -1)
        for row in np.flatnonzero(wanted):
            i = step_of_row[row]
            yield Part(
                float(start[i]), float(end[i]), int(columns["replica"][i]), int(columns["step"][i]),
                int(requests[row]), Phase(int(lists["phases"][0][row])), int(lists["num_tokens"][0][row]),
                sum(int(word) << (64 * k) for k, word in enumerate(words[row])),
            )  # fmt: skip


def engine_figure(run: Run, policy: str, index: int, at: float, why: str) -> Figure | None:
    """Rows over time from `at` (s) on, coloured by phase: some steps of the replica that works then."""
    found: list[Part] = []
    for part in parts(run, policy, [(at, math.inf)]):
        first = found[0] if found else part
        if part.replica == first.replica and part.step >= first.step + NUM_STEPS:
            break
        if part.replica == first.replica:
            found.append(part)
    if not found:
        return None
    lanes = _lanes(found)
    shown = [part for part in found if lanes[part.request] < MAX_LANES]
    begin = min(part.start for part in found)
    height = 90 + LANE * (1 + max(lanes[part.request] for part in shown))
    chart = Chart(f"seconds after {begin:,.2f} s", "rows", height=max(190, height), legend=True)
    flushed = {(part.request, part.step) for part in shown if part.phase == Phase.FLUSH}
    for phase, (name, ink) in PHASES.items():
        mine = [part for part in shown if part.phase == phase]
        if not mine:
            continue
        computed = [max(1, part.num_tokens) for part in mine]
        # A row that commits much of what it computes is dark, one that commits nothing is pale. So is a pass over
        # committed tokens that repeats the one before it, while the row waits for blocks of others.
        share = [part.num_committed / num for part, num in zip(mine, computed, strict=True)]
        if phase == Phase.FLUSH:
            share = [0.0 if (part.request, part.step - 1) in flushed else 1.0 for part in mine]
        depth = [1.0 if phase in (Phase.PREFILL, Phase.IDLE) else 0.35 + 0.65 * min(1.0, 2 * s) for s in share]
        chart.add(
            "bar", orientation="h", name=name, width=0.8, y=[lanes[part.request] for part in mine],
            base=[part.start - begin for part in mine], x=[0.94 * (part.end - part.start) for part in mine],
            marker={"color": ink, "opacity": [round(d, 2) for d in depth], "line": {"width": 0}},
            customdata=[[part.request, part.step, part.num_tokens, part.num_committed] for part in mine],
            hovertemplate="request %{customdata[0]}, step %{customdata[1]}: " + name
            + ", %{customdata[2]} computed, %{customdata[3]} committed<extra></extra>",
        )  # fmt: skip
    chart.layout |= {"barmode": "overlay", "bargap": 0}
    chart.y |= {"autorange": "reversed", "showticklabels": False, "ticks": "", "showgrid": False}
    left_out = len(lanes) - len({part.request for part in shown})
    num_steps = len({part.step for part in found})
    caption = (
        f"{num_steps} steps of replica {found[0].replica} from {begin:,.1f} s on, {why}. Each bar is a row in a step, "
        "darker the more of the positions that it denoises it commits; pale green while it waits for others' blocks. "
        "Drag to zoom, double-click to reset."
    )
    if left_out:
        caption += f" {left_out} requests beyond {MAX_LANES} rows are left out."
    return Figure(f"engine-{index}", policy, caption, chart, wide=True)


def stories(
    run: Run, policy: str, columns: Columns, rows: Sequence[int], block_length: int
) -> list[dict[str, list[Any]]]:  # fmt: skip
    """The timelines of single requests, the rows of the request table: see `_story`."""
    ends = np.where(np.isnan(columns["finish"]), np.inf, columns["finish"])
    spans = [(float(columns["scheduled"][i]) - NEAR, float(ends[i]) + NEAR) for i in rows]
    own: dict[int, list[Part]] = {int(columns["request"][i]): [] for i in rows}
    for part in parts(run, policy, spans, own):
        own[part.request].append(part)
    return [
        _story({name: column[i] for name, column in columns.items()}, own[int(columns["request"][i])], block_length)
        for i in rows
    ]


def _story(request: Mapping[str, Any], mine: Sequence[Part], block_length: int) -> dict[str, list[Any]]:
    """A request queued, prefilled, in steps, by blocks and as emitted, in seconds since it arrived.

    Blocks and emissions are worked out from the positions that committed, and left out where they do not agree with
    the number and the times of emissions in the request table.
    """
    arrival = float(request["arrival"])
    found: dict[str, list[Any]] = {"queued": [], "prefill": [], "steps": [], "blocks": [], "emissions": []}
    if not math.isnan(request["scheduled"]):
        found["queued"].append([0.0, float(request["scheduled"]) - arrival])
    for part in mine:
        span = [part.start - arrival, part.end - arrival]
        if part.phase == Phase.PREFILL:
            found["prefill"].append([*span, part.num_tokens])
        else:
            found["steps"].append([*span, part.num_committed, PHASES[part.phase][0]])
    known = [float(request[name]) - arrival for name in ("first_emission", "last_emission")]
    each = [[0.0, part.end - arrival, 1, part.num_committed] for part in mine if part.commits]
    by_block = [
        _blocks(mine, int(request["input_length"]), block_length, arrival, flushed) for flushed in (False, True)
    ]
    for blocks in (*by_block, each):
        times = [block[1] for block in blocks]
        if len(times) == request["num_emissions"] and times and np.allclose([times[0], times[-1]], known, atol=NEAR):
            found["emissions"] = times
            found["blocks"] = [] if blocks is each else blocks
            return found
    found["emissions"] = sorted({time for time in known if not math.isnan(time)})
    return found


def _blocks(mine: Sequence[Part], prompt: int, length: int, arrival: float, flushed: bool) -> list[list[Any]]:
    """[start, end, steps, tokens] of each block; the first begins in the prompt's last one.

    flushed: a block that decode steps completed ends with the last pass over its committed tokens that follows.
    """
    if length < 2:
        return []
    whole = (1 << length) - 1
    before = (1 << (prompt % length)) - 1
    blocks: list[list[Any]] = []
    union, num_steps, tokens, start = before, 0, 0, math.nan
    for part, after in itertools.zip_longest(mine, mine[1:]):
        if not num_steps and not part.commits and part.phase != Phase.DENOISE:
            continue  # the block before, or a prompt without a partial one
        if not num_steps:
            start = part.start
        num_steps += 1
        tokens += part.num_committed
        union |= part.commits
        if union & whole == whole:
            if flushed and part.phase != Phase.PREFILL and after is not None and after.phase == Phase.FLUSH:
                continue
            blocks.append([start - arrival, part.end - arrival, num_steps, tokens])
            union, num_steps, tokens = 0, 0, 0
    if tokens:
        blocks.append([start - arrival, mine[-1].end - arrival, num_steps, tokens])
    return blocks


def _lanes(found: Sequence[Part]) -> dict[int, int]:
    """A lane for each request from its first step to its last: the lowest that is free."""
    last = {part.request: part.step for part in found}
    lanes: dict[int, int] = {}
    busy: dict[int, int] = {}  # lane -> the last step of who has it
    for part in found:
        if part.request not in lanes:
            lane = next(k for k in range(len(busy) + 1) if busy.get(k, -1) < part.step)
            lanes[part.request], busy[lane] = lane, last[part.request]
    return lanes


def slowest(values: "npt.NDArray[np.float64]", num: int) -> list[int]:
    """The rows with the greatest values, greatest first; those without one are left out."""
    order = np.argsort(-values, kind="stable")
    return [int(i) for i in order[:num] if not math.isnan(values[i])]
