"""Keyed draws of commits by the models of commits.py, row by row."""

from typing import Any

import numpy as np
import numpy.typing as npt

from .chance import draw64, key64, pick64, uniform64
from .hooks import threshold_now
from .jit import inlined, rule
from .records import columns_of
from .state import MASKED, AnyPolicy, Draws, Marks, Masks, Replica, RequestDraw, step_slots

OF_COMMITS, OF_STEPS, OF_BLOCKS, OF_IMPORTANCE = range(4)  # Draws.streams
BLOCK_FACTORS, STEP_FACTORS, NORMAL = range(3)  # Draws.factors
CELLS, CELLS_PER_STD = 2000, 200  # of normal quantiles, -5 to 5 standard deviations


REQUEST_DRAW = np.dtype(list(columns_of(RequestDraw)))


@inlined
def row_of(masks: Masks, i: int) -> Masks:
    return Masks(
        status=masks.status[i],
        evaluations=masks.evaluations[i],
        window=masks.window[i],
        start=int(masks.start[i]),
        prompt=int(masks.prompt[i]),
        request=int(masks.request[i]),
    )


@inlined
def masks_of(replica: Replica, slot: int, window: Marks) -> Masks:
    sequence = replica.sequences[slot]
    return Masks(
        status=replica.status[slot],
        evaluations=replica.evaluations[slot],
        window=window,
        start=int(sequence.start),
        prompt=int(sequence.prompt),
        request=int(sequence.request),
    )


@rule
def draw_row(row: Masks, committed: Marks, draws: Draws, surety: npt.NDArray[np.float64]) -> None:
    """Mark the window's masks that commit: scores above 1, at least the best.

    surety [width] gets the scores of the masks that may commit, if it is not empty.
    """
    if len(draws.ahead) == 0:
        _draw_columns(row, committed, draws, surety, 1.0, True)
        return
    block, factor, progress = len(draws.stage) - 1, 1.0, 1.0
    for begin in range(0, len(committed), block):
        end = begin + block
        part = Masks(
            status=row.status[begin:end],
            evaluations=row.evaluations[begin:end],
            window=row.window[begin:end],
            start=row.start + begin,
            prompt=row.prompt,
            request=row.request,
        )
        forces = progress >= draws.ahead[1]
        _draw_columns(part, committed[begin:end], draws, surety[begin:end], factor, forces)
        masks = 0
        for p in range(block):
            masks += part.status[p] == MASKED
        progress = (block - masks) / block
        if masks > 0:
            factor *= draws.ahead[0]


@rule
def _draw_columns(
    row: Masks, committed: Marks, draws: Draws, surety: npt.NDArray[np.float64], factor: float, forces: bool
) -> None:
    """`draw_row` of columns with one frontier; factor: of the odds. forces: at least the best commits."""
    status, evaluations, window, start, request = row.status, row.evaluations, row.window, row.start, row.request
    entry = draws.requests[request]
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
            theta = entry.factor * draws.factors[BLOCK_FACTORS, pick64(drawn)] * step * draws.stage[done] * factor
            padding = block > entry.last_block - entry.num_padding
        score = np.inf
        if not padding:
            score = 0.0
        if not padding and theta > 0.0:  # odds may be infinite
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
    if forces and not passed and best_p >= 0:
        committed[best_p] = True


@rule
def draw_plan(masks: Masks, draws: Draws, surety: npt.NDArray[np.float64]) -> Any:
    """Masks of a plan that commit, [rows, width]; surety: as in draw_row, [rows, width] or [rows, 0]."""
    committed = np.zeros(masks.window.shape, np.bool_)
    for i in range(len(committed)):
        draw_row(row_of(masks, i), committed[i], draws, surety[i])
    return committed


@rule
def draw_slot(replica: Replica, slot: int, window: Marks, committed: Marks, draws: Draws) -> None:
    draw_row(masks_of(replica, slot, window), committed, draws, draws.law[:0])


@rule
def accept_row(row: Masks, committed: Marks, draws: Draws) -> None:
    """Mark the next token, and drafts up to the first rejected one."""
    stream = key64(draws.streams[OF_COMMITS], row.request)
    goes_on = True
    for p in range(len(row.window)):
        if p > 0 and goes_on:
            goes_on = uniform64(draw64(stream, row.start + p, 0)) < draws.odds[p]
        committed[p] = goes_on and row.window[p]


@rule
def accept_plan(masks: Masks, draws: Draws) -> Any:
    committed = np.zeros(masks.window.shape, np.bool_)
    for i in range(len(committed)):
        accept_row(row_of(masks, i), committed[i], draws)
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
def steps_left(row: Masks, draws: Draws) -> int:
    """Steps until a row's block commits, this one included; 0: no mask in the window."""
    width = len(row.status)
    first = 0
    while first < width and not (row.window[first] and row.status[first] == MASKED):
        first += 1
    if first == width:
        return 0
    index = max(0, (row.start - row.prompt + width - 1) // width)
    return max(1, steps_of_law(draws, row.request, index) - int(row.evaluations[first]))


@rule
def law_row(row: Masks, committed: Marks, draws: Draws) -> None:
    """Mark the window's masks in the block's last step, else none."""
    last = steps_left(row, draws) == 1
    for p in range(len(committed)):  # branch-free: vectorises
        committed[p] = last & row.window[p] & (row.status[p] == MASKED)


@rule
def law_plan(masks: Masks, draws: Draws) -> Any:
    committed = np.zeros(masks.window.shape, np.bool_)
    for i in range(len(committed)):
        law_row(row_of(masks, i), committed[i], draws)
    return committed


@rule
def draw_by_law(replica: Replica, policy: AnyPolicy, draws: Draws) -> None:
    for slot in step_slots(replica):
        law_row(masks_of(replica, slot, replica.window[slot]), replica.committed[slot], draws)


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
def scheduled_row(row: Masks, committed: Marks, draws: Draws) -> None:
    """Mark the window's leftmost masks, by the schedule."""
    quota = -1
    for p in range(len(committed)):
        committed[p] = False
        if row.window[p] and row.status[p] == MASKED:
            if quota < 0:  # each step has computed every mask
                quota = draws.schedule[min(int(row.evaluations[p]), len(draws.schedule) - 1)]
            if quota > 0:
                committed[p] = True
                quota -= 1


@rule
def scheduled_plan(masks: Masks, draws: Draws) -> Any:
    committed = np.zeros(masks.window.shape, np.bool_)
    for i in range(len(committed)):
        scheduled_row(row_of(masks, i), committed[i], draws)
    return committed


@rule
def draw_scheduled(replica: Replica, policy: AnyPolicy, draws: Draws) -> None:
    for slot in step_slots(replica):
        scheduled_row(masks_of(replica, slot, replica.window[slot]), replica.committed[slot], draws)


@rule
def delta_row(row: Masks, decodable: Marks, draws: Draws, delta: npt.NDArray[np.float32]) -> None:
    """Draw importance deltas [width] of a row's computed masks, by whether each is decodable."""
    stream = key64(key64(np.uint64(0), draws.streams[OF_IMPORTANCE]), row.request)
    frontier = -1
    for p in range(len(row.status)):
        delta[p] = 0.0
        if not row.window[p] or row.status[p] != MASKED:
            continue
        if frontier < 0:
            frontier = p
        normal = draws.factors[NORMAL, pick64(key64(key64(stream, row.start + p), row.evaluations[p]))]
        kind = 2 * (not decodable[p])
        raw = draws.deltas[kind] + draws.deltas[kind + 1] * normal
        delta[p] = np.float32(raw - draws.deltas[4] * (p - frontier))
