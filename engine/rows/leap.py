"""Leaps: steps of the same rows that differ by counts alone, run without touching the rows one by one.

A leap does what the same number of steps would do, bit for bit; it ends before a step that anything else could change:
one that ends a row or its block, computes something else, needs pages that are not free, or begins after a request came
that might be let in.
"""

from ..admission import enter
from ..draw import masks_of, steps_left
from ..emission import count_decode_steps, count_gaps
from ..hooks import hold, paged_ahead, steady
from ..jit import rule
from ..latency import price
from ..state import (
    DENOISE,
    EMIT_END,
    MASKED,
    NO,
    ROWS,
    RUNNING,
    UNTIL_A_REQUEST,
    AnyPolicy,
    Cost,
    Draws,
    Replica,
    step_slots,
)
from .chunked import ChunkState


@rule
def leap_tokens(replica: Replica, policy: AnyPolicy, draws: Draws, cost: Cost, horizon: float) -> None:
    """A leap over steps in which each row computes its next token."""
    take_tokens(replica, policy, cost, horizon, True)


@rule
def take_tokens(replica: Replica, policy: AnyPolicy, cost: Cost, horizon: float, multiplies: bool) -> int:
    """Take steps in which each row computes its next token; returns their number.

    multiplies: a step's equal gaps are multiplied, where the rows' own rule does so, and not added up: bits differ.
    """
    counters, fixed = replica.counters, replica.fixed
    how_long = steady(replica, policy)
    if how_long == NO or counters.prefill_tokens > 0 or fixed.window > 0:
        return 0
    ahead = int(paged_ahead(replica, policy))
    emitting, limit = _prepare(replica, ahead)
    rows = counters.num_rows
    now, steps, place = counters.clock, 0, 0
    while steps < limit and not _ends(replica, how_long):
        if counters.pages_held + replica.growth[place] > fixed.num_pages:
            break
        counters.sum_q_kv += rows  # a key more for each row's one token
        counters.sum_kv += rows
        latency = price(replica, cost)
        end = now + latency
        if not end < horizon:
            counters.sum_q_kv -= rows
            counters.sum_kv -= rows
            break
        counters.pages_held += replica.growth[place]
        _hold_filled(replica, policy, steps, ahead, place)
        counters.latency = latency
        waiting, submitted = counters.num_waiting, counters.submitted
        enter(replica, end)
        _count_steps(replica, now, end, waiting, submitted, rows, 1)
        if emitting > 0:
            gap = end - now
            count_gaps(replica, gap, emitting)
            if multiplies:
                counters.gap_sum += gap * emitting
            else:
                gaps = 0.0
                for _ in range(emitting):
                    gaps += gap
                counters.gap_sum += gaps
        now = end
        steps += 1
        place = (place + 1) % fixed.page
    if steps > 0:
        counters.clock = now
        _settle(replica, steps, now, ahead)
    return steps


@rule
def _hold_filled(replica: Replica, policy: AnyPolicy, steps: int, ahead: int, place: int) -> None:
    """Hold the pages that this step's tokens fill, as the step's decision does, after this many `steps` of a leap.

    place: the step's place in `replica.growth`; a row fills a page `2 - ahead` steps before it takes another.
    """
    page = replica.fixed.page
    if replica.growth[place] == 0 and (ahead == 2 or replica.growth[(place + 1) % page] == 0):
        return
    for slot in step_slots(replica):
        filled = int(replica.sequences[slot].start) + steps + 1
        if filled % page == 0 or (filled + ahead - 2) % page == 0:
            hold(replica, policy, slot, filled)


@rule
def _count_steps(
    replica: Replica, now: float, end: float, waiting: int, submitted: int, committed: int, times: int
) -> None:
    """Count decode steps of the same rows and latency, as `begin` and `account` do.

    The last began `now`, with these requests waiting and submitted. committed: by each.
    """
    counters = replica.counters
    counters.now = now
    counters.end = end
    counters.pages = counters.pages_held
    counters.waiting = waiting
    counters.submitted_then = submitted
    counters.num_steps += times
    for _ in range(times):  # added up, not multiplied: bits differ
        counters.page_time += counters.pages * counters.latency
    counters.max_waiting = max(counters.max_waiting, waiting)
    count_decode_steps(replica, committed, counters.num_rows, times)


@rule
def _prepare(replica: Replica, ahead: int) -> tuple[int, int]:
    """The rows that return a token a step, and the steps that all rows can take; fills `replica.growth`."""
    counters, page = replica.counters, replica.fixed.page
    replica.growth[:] = 0
    emits = replica.fixed.emit != EMIT_END
    emitting = 0
    limit = 1 << 30
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        limit = min(limit, sequence.stop - sequence.start - 2)
        remaining = sequence.answer - sequence.prompt - sequence.emitted
        if emits and remaining > 0:
            if replica.requests[sequence.request].last_emission != counters.clock:
                return 0, 0  # its next gap differs from all others
            emitting += 1
            limit = min(limit, remaining)
        spare = sequence.pages * page - (sequence.start + ahead)  # tokens that its pages have room for
        if spare < 0:
            spare = -1
        elif spare >= page:
            limit = min(limit, spare)
        replica.growth[(spare + 1) % page] += 1
    return emitting, limit


@rule
def _settle(replica: Replica, steps: int, now: float, ahead: int) -> None:
    """Bring the rows up to date at the end of a leap's last step."""
    counters, page = replica.counters, replica.fixed.page
    emits = replica.fixed.emit != EMIT_END
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        outcome = replica.requests[sequence.request]
        sequence.pages = max(sequence.pages, -(-(sequence.start + steps - 1 + ahead) // page))
        sequence.start += steps
        sequence.num_keys = sequence.start
        outcome.num_forwards += steps
        outcome.num_committed += steps
        outcome.num_computed += steps
        if emits and sequence.emitted < sequence.answer - sequence.prompt:
            outcome.last_emission = now
            outcome.num_emissions += steps
            outcome.num_tokens += steps
            counters.expected_tokens -= min(steps, max(0, sequence.expected - sequence.emitted))
            sequence.emitted += steps


@rule
def _ends(replica: Replica, how_long: int) -> bool:
    """Whether a request that came ends a leap."""
    return how_long == UNTIL_A_REQUEST and replica.counters.num_waiting > 0


@rule
def leap_canvases(replica: Replica, policy: AnyPolicy, draws: Draws, cost: Cost, horizon: float) -> None:
    """A leap over steps, all of one price, in which all rows denoise a canvas and no row commits one."""
    counters = replica.counters
    how_long = steady(replica, policy)
    if how_long == NO or counters.prefill_tokens > 0 or counters.num_rows != counters.num_running:
        return
    limit = _steps_without_commits(replica, draws)
    began = now = counters.clock
    waiting, submitted, steps = counters.waiting, counters.submitted_then, 0
    while steps < limit and not _ends(replica, how_long) and now + counters.latency < horizon:
        began, now = now, now + counters.latency
        waiting, submitted = counters.num_waiting, counters.submitted
        enter(replica, now)
        steps += 1
    if steps == 0:
        return
    counters.clock = now
    _count_steps(replica, began, now, waiting, submitted, 0, steps)
    counters.fruitless += steps
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        sequence.fruitless += steps
        outcome = replica.requests[sequence.request]
        outcome.num_forwards += steps
        outcome.num_computed += steps * sequence.num_retained
        status, evaluations, window = replica.status[slot], replica.evaluations[slot], replica.window[slot]
        for p in range(len(status)):
            evaluations[p] += (window[p] & (status[p] == MASKED)) * steps


@rule
def _steps_without_commits(replica: Replica, draws: Draws) -> int:
    """Steps like the one that is over, in which all rows denoise; 0 where it was no such step."""
    counters = replica.counters
    limit = replica.fixed.most_fruitless - 1 - counters.fruitless
    for i in range(counters.num_rows):
        slot = replica.lists[ROWS, i]
        sequence = replica.sequences[slot]
        if slot != replica.lists[RUNNING, i] or sequence.phase != DENOISE:
            return 0
        if sequence.num_tokens != replica.fixed.block or replica.evaluations[slot, 0] == 0:
            return 0  # cut by a budget; a new canvas
        limit = min(limit, replica.fixed.most_fruitless - 1 - sequence.fruitless)
        remaining = steps_left(masks_of(replica, slot, replica.window[slot]), draws)
        limit = min(limit, remaining - 1)
    return int(limit)


@rule
def leap_chunked(replica: Replica, policy: ChunkState, draws: Draws, cost: Cost, horizon: float) -> None:
    """Leap over steps in which all running requests compute the next token, without drafts."""
    counters = replica.counters
    if counters.num_rows != counters.num_running:
        return
    for i in range(counters.num_rows):
        slot = replica.lists[ROWS, i]
        sequence, columns = replica.sequences[slot], policy.columns[slot]
        if slot != replica.lists[RUNNING, i] or sequence.phase != DENOISE:
            return
        if columns.computed != sequence.start or columns.goal != columns.computed + 1:
            return
    steps = take_tokens(replica, policy, cost, horizon, False)
    for slot in step_slots(replica):
        columns = policy.columns[slot]
        columns.computed += steps
        columns.goal += steps
        columns.settled = columns.computed
