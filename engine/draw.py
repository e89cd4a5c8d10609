"""Keyed draws of commits by the models of commits.py, row by row."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .chance import draw64, key64, pick64, uniform64
from .hooks import threshold_now
from .jit import outer, rule
from .records import F8, I4, Record, Table, columns_of
from .state import MASKED, AnyPolicy, Evaluations, Marks, Replica, Status, step_slots

OF_COMMITS, OF_STEPS, OF_BLOCKS, OF_IMPORTANCE = range(4)  # Draws.streams
BLOCK_FACTORS, STEP_FACTORS, NORMAL = range(3)  # Draws.factors
CELLS, CELLS_PER_STD = 2000, 200  # of normal quantiles, -5 to 5 standard deviations


class RequestDraw(Record):
    """Draws fixed for a request's life."""

    factor: F8  # of the odds
    last_block: I4  # from the start of the prompt
    num_padding: I4  # last blocks of padding
    most: I4  # by a law: steps of a block


# A plan's arrays, [rows] or [rows, width].
Statuses: TypeAlias = npt.NDArray[np.uint8]
Counts: TypeAlias = npt.NDArray[np.uint16]
Windows: TypeAlias = npt.NDArray[np.bool_]
Indices: TypeAlias = npt.NDArray[np.int32]

REQUEST_DRAW = np.dtype(list(columns_of(RequestDraw)))


class Draws(NamedTuple):
    """A commit model, law or schedule with its seed, for rules."""

    requests: Table[RequestDraw]  # [requests]
    streams: npt.NDArray[np.uint64]  # [4] a key per purpose
    # [width] by distance from the frontier; for drafts, acceptances.
    odds: npt.NDArray[np.float64]
    # [block_length + 1] by committed positions; with a histogram, CanvasLaw.by_canvas.
    stage: npt.NDArray[np.float64]
    # [3, 1024] quantiles of block factors, step factors, and the normal distribution.
    factors: npt.NDArray[np.float64]
    deltas: npt.NDArray[np.float64]  # [5] ImportanceDeltas
    schedule: npt.NDArray[np.int64]  # [steps] masks that commit in each step of a block
    # [3] CanvasLaw's median, drift, least; with a histogram [3 + CELLS], then its forwards.
    law: npt.NDArray[np.float64]


@rule
def draw_row(
    status: Status, evaluations: Evaluations, window: Marks, committed: Marks, start: int, request: int,
    last_block: int, num_padding: int, factor: float, draws: Draws, surety: npt.NDArray[np.float64],
) -> None:  # fmt: skip
    """Mark the window's masks that commit: scores above 1, at least the best.

    surety [width] gets the scores of the masks that may commit, if it is not empty.
    """
    width, block_length = len(status), len(draws.stage) - 1
    for p in range(width):
        committed[p] = False
    frontier = 0
    while frontier < width and status[frontier] != MASKED:
        frontier += 1
    if frontier == width:
        return
    of_commits = key64(draws.streams[OF_COMMITS], request)
    drawn = draw64(key64(draws.streams[OF_STEPS], request), start + frontier, evaluations[frontier])
    step = draws.factors[STEP_FACTORS, pick64(drawn)]
    best = -1.0
    best_p = -1
    passed = False
    end = 0  # of the block of theta and padding
    theta = 0.0
    padding = False
    for p in range(frontier, width):
        if not (window[p] and status[p] == MASKED):
            continue
        if p >= end:
            offset = p // block_length * block_length
            end = offset + block_length
            block = start // block_length + offset // block_length
            done = 0
            for k in range(block_length):
                done += status[offset + k] != MASKED
            drawn = draw64(key64(draws.streams[OF_BLOCKS], request), block, 0)
            theta = factor * draws.factors[BLOCK_FACTORS, pick64(drawn)] * step * draws.stage[done]
            padding = block > last_block - num_padding
        score = np.inf
        if not padding:
            u = uniform64(draw64(of_commits, start + p, evaluations[p]))
            score = draws.odds[p - frontier] * theta * ((1.0 - u) / u)
        if len(surety) > 0:
            surety[p] = score
        if score > 1.0:
            committed[p] = True
            passed = True
        if score > best:
            best = score
            best_p = p
    if not passed and best_p >= 0:
        committed[best_p] = True


@outer
def draw_plan(
    status: Statuses, evaluations: Counts, window: Windows, start: Indices, requests: Indices, draws: Draws,
    surety: npt.NDArray[np.float64],
) -> Any:  # fmt: skip
    """Masks of a plan that commit, [rows, width]; surety: as in draw_row, [rows, width] or [rows, 0]."""
    committed = np.zeros(window.shape, np.bool_)
    for i in range(len(requests)):
        request = int(requests[i])
        entry = draws.requests[request]
        draw_row(
            status[i], evaluations[i], window[i], committed[i], int(start[i]), request, int(entry.last_block),
            int(entry.num_padding), entry.factor, draws, surety[i],
        )  # fmt: skip
    return committed


@rule
def draw_slot(replica: Replica, slot: int, window: Marks, committed: Marks, draws: Draws) -> None:
    sequence = replica.sequences[slot]
    entry = draws.requests[sequence.request]
    draw_row(
        replica.status[slot], replica.evaluations[slot], window, committed, int(sequence.start), int(sequence.request),
        int(entry.last_block), int(entry.num_padding), entry.factor, draws, draws.law[:0],
    )  # fmt: skip


@rule
def accept_row(window: Marks, committed: Marks, start: int, request: int, draws: Draws) -> None:
    """Mark the next token, and drafts up to the first rejected one."""
    stream = key64(draws.streams[OF_COMMITS], request)
    goes_on = True
    for p in range(len(window)):
        if p > 0 and goes_on:
            goes_on = uniform64(draw64(stream, start + p, 0)) < draws.odds[p]
        committed[p] = goes_on and window[p]


@outer
def accept_plan(window: Windows, start: Indices, requests: Indices, draws: Draws) -> Any:
    committed = np.zeros(window.shape, np.bool_)
    for i in range(len(requests)):
        accept_row(window[i], committed[i], int(start[i]), int(requests[i]), draws)
    return committed


@rule
def steps_of_law(draws: Draws, request: int, index: int) -> int:
    """Forwards until a request's block `index` (from 0) commits (commits.CanvasLaw)."""
    drawn, entry = draw64(key64(draws.streams[OF_BLOCKS], request), index, 0), draws.requests[request]
    if len(draws.law) > 3:
        z = entry.factor + draws.factors[BLOCK_FACTORS, pick64(drawn)] + draws.stage[min(index, len(draws.stage) - 1)]
        cell = min(max(int(np.floor(z * CELLS_PER_STD)) + CELLS // 2, 0), CELLS - 1)
        return int(min(draws.law[3 + cell], entry.most))
    steps = draws.law[0] * entry.factor * draws.factors[BLOCK_FACTORS, pick64(drawn)]
    for _ in range(index):
        steps *= draws.law[1]
    return int(min(max(np.floor(steps + 0.5), draws.law[2]), entry.most))


@rule
def steps_left(
    status: Status, evaluations: Evaluations, window: Marks, start: int, prompt: int, request: int, draws: Draws
) -> int:  # fmt: skip
    """Steps until a row's block commits, this one included; 0: no mask in the window."""
    width = len(status)
    first = 0
    while first < width and not (window[first] and status[first] == MASKED):
        first += 1
    if first == width:
        return 0
    index = max(0, (start - prompt + width - 1) // width)
    return max(1, steps_of_law(draws, request, index) - int(evaluations[first]))


@rule
def law_row(
    status: Status, evaluations: Evaluations, window: Marks, committed: Marks, start: int, prompt: int, request: int,
    draws: Draws,
) -> None:  # fmt: skip
    """Mark the window's masks in the block's last step, else none."""
    width = len(status)
    last = steps_left(status, evaluations, window, start, prompt, request, draws) == 1
    for p in range(width):  # branch-free: vectorises
        committed[p] = last & window[p] & (status[p] == MASKED)


@outer
def law_plan(
    status: Statuses, evaluations: Counts, window: Windows, start: Indices, prompt: Indices, requests: Indices,
    draws: Draws,
) -> Any:  # fmt: skip
    committed = np.zeros(window.shape, np.bool_)
    for i in range(len(requests)):
        law_row(
            status[i], evaluations[i], window[i], committed[i], int(start[i]), int(prompt[i]), int(requests[i]), draws
        )  # fmt: skip
    return committed


@rule
def draw_by_law(replica: Replica, policy: AnyPolicy, draws: Draws) -> None:
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        law_row(
            replica.status[slot],
            replica.evaluations[slot],
            replica.window[slot],
            replica.committed[slot],
            int(sequence.start),
            int(sequence.prompt),
            int(sequence.request),
            draws,
        )


@rule
def draw_block(replica: Replica, policy: AnyPolicy, draws: Draws) -> None:
    for slot in step_slots(replica):
        draw_slot(replica, slot, replica.window[slot], replica.committed[slot], draws)


@rule
def keep_commits(replica: Replica, policy: AnyPolicy, draws: Draws) -> None:
    """The commits are chosen in Python (Unmasking.unmask)."""


@rule
def draws_at_threshold(replica: Replica, policy: AnyPolicy, draws: Draws) -> Any:
    """Draws at the step's threshold."""
    counters = replica.counters
    counters.threshold = threshold_now(replica, policy)
    return draws[int(counters.threshold)]


@rule
def scheduled_row(status: Status, evaluations: Evaluations, window: Marks, committed: Marks, draws: Draws) -> None:
    """Mark the window's leftmost masks, by the schedule."""
    quota = -1
    for p in range(len(status)):
        committed[p] = False
        if window[p] and status[p] == MASKED:
            if quota < 0:  # each step has computed every mask
                quota = draws.schedule[min(int(evaluations[p]), len(draws.schedule) - 1)]
            if quota > 0:
                committed[p] = True
                quota -= 1


@outer
def scheduled_plan(status: Statuses, evaluations: Counts, window: Windows, draws: Draws) -> Any:
    committed = np.zeros(window.shape, np.bool_)
    for i in range(len(window)):
        scheduled_row(status[i], evaluations[i], window[i], committed[i], draws)
    return committed


@rule
def draw_scheduled(replica: Replica, policy: AnyPolicy, draws: Draws) -> None:
    for slot in step_slots(replica):
        scheduled_row(
            replica.status[slot], replica.evaluations[slot], replica.window[slot], replica.committed[slot], draws
        )


@rule
def delta_row(
    status: Status, evaluations: Evaluations, window: Marks, decodable: Marks, start: int, request: int, draws: Draws,
    delta: npt.NDArray[np.float32],
) -> None:  # fmt: skip
    """Draw importance deltas [width] of a row's computed masks, by whether each is decodable."""
    stream = key64(key64(np.uint64(0), draws.streams[OF_IMPORTANCE]), request)
    frontier = -1
    for p in range(len(status)):
        delta[p] = 0.0
        if not window[p] or status[p] != MASKED:
            continue
        if frontier < 0:
            frontier = p
        normal = draws.factors[NORMAL, pick64(key64(key64(stream, start + p), evaluations[p]))]
        kind = 2 * (not decodable[p])
        raw = draws.deltas[kind] + draws.deltas[kind + 1] * normal
        delta[p] = np.float32(raw - draws.deltas[4] * (p - frontier))
