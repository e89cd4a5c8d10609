"""Leaps: steps of the same rows that differ by counts alone, run without touching the rows one by one.

A leap does what the same number of steps would do, bit for bit; it ends before a step that anything else could change:
one that ends a row or its block, computes something else, needs pages that are not free, or begins after a request came
that might be let in.
"""

from ..admission import canvas_width, enter, reads_only
from ..draw import Draws, steps_left
from ..emission import count_decode_steps, count_gaps
from ..hooks import hold, paged_ahead, steady
from ..jit import rule
from ..journal import Journal, has_room, record_again
from ..latency import Cost, price
from ..state import DENOISE, EMIT_END, MASKED, NO, ROWS, RUNNING, UNTIL_A_REQUEST, AnyPolicy, Replica, step_slots


@rule
def leap_tokens(
    replica: Replica, policy: AnyPolicy, draws: Draws, cost: Cost, journal: Journal, horizon: float
) -> None:  # fmt: skip
    """A leap over steps in which each row computes its next token."""
    take_tokens(replica, policy, cost, journal, horizon, True)


@rule
def take_tokens(
    replica: Replica, policy: AnyPolicy, cost: Cost, journal: Journal, horizon: float, multiplies: bool
) -> int:  # fmt: skip
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
    while steps < limit and goes_on(replica, how_long, journal):
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
        _take_step(replica, journal, steps, now, end, latency, rows)
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
        place = place + 1 if place + 1 < fixed.page else 0
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
def _take_step(
    replica: Replica, journal: Journal, steps: int, now: float, end: float, latency: float, committed: int
) -> None:  # fmt: skip
    """Take a decode step of the same rows, as `begin` and `account` do.

    steps: those of the leap before it. committed: a token of each row.
    """
    counters = replica.counters
    counters.latency = latency
    waiting, submitted = counters.num_waiting, counters.submitted
    record_again(replica, journal, steps, now, waiting, submitted, True)
    enter(replica, end)
    _count_steps(replica, now, end, waiting, submitted, committed, committed, 1)


@rule
def _count_steps(
    replica: Replica, now: float, end: float, waiting: int, submitted: int, committed: int, forwards: int, times: int
) -> None:  # fmt: skip
    """Count decode steps of one latency; the last of them began `now`, with these requests waiting and submitted.

    committed, forwards: as in count_decode_steps.
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
    count_decode_steps(replica, committed, forwards, times)


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
            counters.outstanding_tokens -= steps


@rule
def goes_on(replica: Replica, how_long: int, journal: Journal) -> bool:
    """Whether nothing that came, and no full journal, ends a leap."""
    return (how_long != UNTIL_A_REQUEST or replica.counters.num_waiting == 0) and has_room(replica, journal)


@rule
def take_alike(replica: Replica, how_long: int, limit: int, journal: Journal, horizon: float) -> int:
    """Take at most `limit` steps that are priced like the one that is over; returns their number.

    Counts each row's forwards and positions; callers change the rows, and record what these steps commit.
    """
    counters = replica.counters
    latency = counters.latency
    began = now = counters.clock
    waiting, submitted, steps = counters.waiting, counters.submitted_then, 0
    while steps < limit and goes_on(replica, how_long, journal):
        end = now + latency
        if not end < horizon:
            break
        began, now = now, end
        waiting, submitted = counters.num_waiting, counters.submitted
        record_again(replica, journal, steps, began, waiting, submitted, False)
        enter(replica, end)
        steps += 1
    if steps > 0:
        counters.clock = now
        _count_steps(replica, began, now, waiting, submitted, 0, counters.num_rows, steps)
        for slot in step_slots(replica):
            sequence = replica.sequences[slot]
            outcome = replica.requests[sequence.request]
            outcome.num_forwards += steps
            outcome.num_computed += steps * sequence.num_retained
    return steps


@rule
def leap_canvases(
    replica: Replica, policy: AnyPolicy, draws: Draws, cost: Cost, journal: Journal, horizon: float
) -> None:  # fmt: skip
    """A leap over steps in which all rows denoise a canvas and no row commits one."""
    counters = replica.counters
    how_long = steady(replica, policy)
    if how_long == NO or counters.prefill_tokens > 0 or counters.num_rows != counters.num_running:
        return
    steps = take_alike(replica, how_long, _steps_without_commits(replica, draws), journal, horizon)
    if steps == 0:
        return
    counters.fruitless += steps
    for slot in step_slots(replica):
        replica.sequences[slot].fruitless += steps
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
        if slot != replica.lists[RUNNING, i] or sequence.phase != DENOISE or reads_only(replica, sequence):
            return 0
        if sequence.num_tokens != canvas_width(replica, sequence) or replica.evaluations[slot, 0] == 0:
            return 0  # cut by a budget; a new canvas
        limit = min(limit, replica.fixed.most_fruitless - 1 - sequence.fruitless)
        remaining = steps_left(
            replica.status[slot], replica.evaluations[slot], replica.window[slot], int(sequence.start),
            int(sequence.prompt), int(sequence.request), draws,
        )  # fmt: skip
        limit = min(limit, remaining - 1)
    return int(limit)
