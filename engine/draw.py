"""Keyed draws of a step's commits: what commits.py's models mean, row by row."""

from typing import Any, NamedTuple

import numpy as np

from .chance import draw64, key64, pick64, uniform64
from .hooks import threshold
from .jit import outer, rule, whole
from .state import MASKED, ROWS

OF_COMMITS, OF_STEPS, OF_BLOCKS, OF_IMPORTANCE = range(4)  # Draws.streams
BLOCK_FACTORS, STEP_FACTORS, NORMAL = range(3)  # Draws.factors
CELLS, CELLS_PER_STD = 2000, 200  # of normal quantiles, five standard deviations either way

REQUEST_DRAW = np.dtype(
    [
        ("factor", "f8"),  # of the odds
        ("last_block", "i4"),  # of the request, from the start of its prompt
        ("num_padding", "i4"),  # blocks, the last ones, that are padding
        ("most", "i4"),  # where a law says how many: steps of a block at most
        ("canvas_length", "i4"),  # ... and positions of its blocks; 0: the policy's
    ]
)


class Draws(NamedTuple):
    """A commit model and a seed as rules take them, or the numbers of masks that a schedule commits."""

    requests: Any  # [requests] REQUEST_DRAW
    streams: Any  # [4] uint64: a key each for what is drawn
    odds: Any  # [width] at distance d from the frontier; of drafts, the probability that each is accepted
    stage: Any  # [block_length + 1] by committed positions of the block; of a histogram, CanvasLaw.by_canvas
    factors: Any  # [3, 1024] quantiles: of a block's factor, a step's, and the normal distribution
    deltas: Any  # [5] ImportanceDeltas
    schedule: Any  # [steps] int64: masks that each step of a block commits
    sub_block: Any  # [1] int64: positions of a block's parts, of which the first with a mask commits alone
    law: Any  # [3] CanvasLaw: median, drift, least; of a histogram [3 + CELLS], with its forwards


@rule
def draw_row(
    status: Any, evaluations: Any, window: Any, committed: Any, start: Any, request: Any, last_block: Any,
    num_padding: Any, factor: Any, d: Any,
) -> None:  # fmt: skip
    """Mark the masks of a row's `window` that commit: those whose score passes 1, and at least the best."""
    width, block_length = len(status), len(d.stage) - 1
    for p in range(width):
        committed[p] = False
    frontier = 0
    while frontier < width and status[frontier] != MASKED:
        frontier += 1
    if frontier == width:
        return
    of_commits = key64(d.streams[OF_COMMITS], request)
    drawn = draw64(key64(d.streams[OF_STEPS], request), start + frontier, evaluations[frontier])
    step = d.factors[STEP_FACTORS, pick64(drawn)]
    best = -1.0
    best_p = -1
    passed = False
    last = 0  # behind the part of the block that commits
    end = 0  # of the block that theta and padding are of
    theta = 0.0
    padding = False
    for p in range(frontier, width):
        if not (window[p] and status[p] == MASKED):
            continue
        if last == 0:
            last = (p // d.sub_block[0] + 1) * d.sub_block[0]
        if p >= last:
            break
        if p >= end:
            offset = p // block_length * block_length
            end = offset + block_length
            block = start // block_length + offset // block_length
            done = 0
            for k in range(block_length):
                done += status[offset + k] != MASKED
            drawn = draw64(key64(d.streams[OF_BLOCKS], request), block, 0)
            theta = factor * d.factors[BLOCK_FACTORS, pick64(drawn)] * step * d.stage[done]
            padding = block > last_block - num_padding
        if padding:
            score = np.inf
        else:
            u = uniform64(draw64(of_commits, start + p, evaluations[p]))
            score = d.odds[p - frontier] * theta * ((1.0 - u) / u)
        if score > 1.0:
            committed[p] = True
            passed = True
        if score > best:
            best = score
            best_p = p
    if not passed and best_p >= 0:
        committed[best_p] = True


@outer
def draw_plan(status: Any, evaluations: Any, window: Any, start: Any, requests: Any, d: Any) -> Any:
    """The masks that commit, [rows, width], of a plan's rows."""
    committed = np.zeros(window.shape, np.bool_)
    for i in range(len(requests)):
        request = int(requests[i])
        own = d.requests[request]
        draw_row(
            status[i], evaluations[i], window[i], committed[i], int(start[i]), request, int(own.last_block),
            int(own.num_padding), own.factor, d,
        )  # fmt: skip
    return committed


@rule
def draw_slot(w: Any, slot: Any, window: Any, committed: Any, d: Any) -> None:
    """The same of a running sequence."""
    q = w.q[slot]
    own = d.requests[q.request]
    draw_row(
        w.status[slot], w.evaluations[slot], window, committed, int(q.start), int(q.request), int(own.last_block),
        int(own.num_padding), own.factor, d,
    )  # fmt: skip


@rule
def accept_row(window: Any, committed: Any, start: Any, request: Any, d: Any) -> None:
    """Mark a row's next token, and of the drafts behind it those up to the first that is not accepted."""
    stream = key64(d.streams[OF_COMMITS], request)
    goes_on = True
    for p in range(len(window)):
        if p > 0 and goes_on:
            goes_on = uniform64(draw64(stream, start + p, 0)) < d.odds[p]
        committed[p] = goes_on and window[p]


@outer
def accept_plan(window: Any, start: Any, requests: Any, d: Any) -> Any:
    """The tokens that come, [rows, columns], of a plan's rows."""
    committed = np.zeros(window.shape, np.bool_)
    for i in range(len(requests)):
        accept_row(window[i], committed[i], int(start[i]), int(requests[i]), d)
    return committed


@rule
def steps_of_law(d: Any, request: Any, index: Any) -> Any:
    """Forwards until a request's block of that index, from 0, is committed (commits.CanvasLaw)."""
    drawn, own = draw64(key64(d.streams[OF_BLOCKS], request), index, 0), d.requests[request]
    if len(d.law) > 3:
        at = own.factor + d.factors[BLOCK_FACTORS, pick64(drawn)] + d.stage[min(index, len(d.stage) - 1)]
        cell = min(max(int(np.floor(at * CELLS_PER_STD)) + CELLS // 2, 0), CELLS - 1)
        return int(min(d.law[3 + cell], own.most))
    steps = d.law[0] * own.factor * d.factors[BLOCK_FACTORS, pick64(drawn)]
    for _ in range(index):
        steps *= d.law[1]
    return int(min(max(np.floor(steps + 0.5), d.law[2]), own.most))


@rule
def law_row(
    status: Any, evaluations: Any, window: Any, committed: Any, start: Any, prompt: Any, request: Any, d: Any
) -> None:  # fmt: skip
    """Mark all masks of a row's window in the last step of its block, and none before."""
    width = len(status)
    own = int(d.requests[request].canvas_length)
    block = own if 0 < own < width else width
    steps = -1
    for p in range(width):
        committed[p] = False
        if window[p] and status[p] == MASKED:
            if steps < 0:
                index = max(0, (start - prompt + block - 1) // block)
                steps = steps_of_law(d, request, index) - 1 - int(evaluations[p])
            committed[p] = steps <= 0


@outer
def law_plan(status: Any, evaluations: Any, window: Any, start: Any, prompt: Any, requests: Any, d: Any) -> Any:
    """The masks that commit, [rows, width], of a plan's rows."""
    committed = np.zeros(window.shape, np.bool_)
    for i in range(len(requests)):
        law_row(
            status[i], evaluations[i], window[i], committed[i], int(start[i]), int(prompt[i]), int(requests[i]), d
        )  # fmt: skip
    return committed


@rule
def draw_by_law(w: Any, x: Any, d: Any) -> None:
    """Predict what the step in flight commits where a law says how many steps a block takes."""
    for i in range(w.c[0].num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        law_row(
            w.status[slot], w.evaluations[slot], w.window[slot], w.committed[slot], int(q.start), int(q.prompt),
            int(q.request), d,
        )  # fmt: skip


@rule
def draw_block(w: Any, x: Any, d: Any) -> None:
    """Predict what the step in flight commits, by a commit model."""
    for i in range(w.c[0].num_rows):
        slot = w.lists[ROWS, i]
        draw_slot(w, slot, w.window[slot], w.committed[slot], d)


_place = whole("threshold")


@rule
def draws_at_threshold(w: Any, x: Any, d: Any) -> Any:
    """The draws of the step's threshold, of those `d` of all thresholds; run refuses a place beyond them."""
    c = w.c[0]
    c.threshold = _place(threshold(w, x))
    return d[min(max(int(c.threshold), 0), len(d) - 1)]


@rule
def scheduled_row(status: Any, evaluations: Any, window: Any, committed: Any, d: Any) -> None:
    """Mark the leftmost masks of a row's window, as many as the schedule says."""
    quota = -1
    for p in range(len(status)):
        committed[p] = False
        if window[p] and status[p] == MASKED:
            if quota < 0:  # every mask of the block has been computed in each of its steps
                quota = d.schedule[min(int(evaluations[p]), len(d.schedule) - 1)]
            if quota > 0:
                committed[p] = True
                quota -= 1


@outer
def scheduled_plan(status: Any, evaluations: Any, window: Any, d: Any) -> Any:
    """The masks that commit, [rows, width], of a plan's rows."""
    committed = np.zeros(window.shape, np.bool_)
    for i in range(len(window)):
        scheduled_row(status[i], evaluations[i], window[i], committed[i], d)
    return committed


@rule
def draw_scheduled(w: Any, x: Any, d: Any) -> None:
    """Predict what the step in flight commits where a fixed number commits each step."""
    for i in range(w.c[0].num_rows):
        slot = w.lists[ROWS, i]
        scheduled_row(w.status[slot], w.evaluations[slot], w.window[slot], w.committed[slot], d)


@rule
def delta_row(
    status: Any, evaluations: Any, window: Any, decodable: Any, start: Any, request: Any, d: Any, delta: Any
) -> None:  # fmt: skip
    """Draw a row's importance deltas [width], by whether a mask is decodable; they count where a mask is computed."""
    stream = key64(key64(np.uint64(0), d.streams[OF_IMPORTANCE]), request)
    frontier = -1
    for p in range(len(status)):
        delta[p] = 0.0
        if not window[p] or status[p] != MASKED:
            continue
        if frontier < 0:
            frontier = p
        normal = d.factors[NORMAL, pick64(key64(key64(stream, start + p), evaluations[p]))]
        own = d.deltas[0] + d.deltas[1] * normal if decodable[p] else d.deltas[2] + d.deltas[3] * normal
        delta[p] = np.float32(own - d.deltas[4] * (p - frontier))
