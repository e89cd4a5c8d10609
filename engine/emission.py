"""Effects of a step's commits: tokens returned, requests finished, totals."""

import numpy as np

from .histogram import FIRST_BIN, NUM_BINS, SHIFT
from .jit import rule
from .latency import window_pairs
from .state import (
    BATCHES,
    CHUNKS,
    COMPLETED,
    DECODE_STEP,
    DONE,
    EMIT_END,
    FLUSH,
    GAP_BINS,
    IDLE,
    MASKED,
    PREFILL,
    PREFILL_STEP,
    STEP_BINS,
    Replica,
    step_slots,
)


@rule
def time_bin(value: float) -> int:
    """Bin of a time (s; histogram.py)."""
    bits = np.float64(value).view(np.int64)
    return min(max(int(bits >> SHIFT) - FIRST_BIN, 0), NUM_BINS - 1)


@rule
def count_gaps(replica: Replica, gap: float, times: int) -> None:
    """Count a gap between emissions (s) for `times` requests."""
    counters = replica.counters
    replica.bins[GAP_BINS, time_bin(gap)] += times
    counters.gap_count += times
    counters.gap_min = min(counters.gap_min, gap)
    counters.gap_max = max(counters.gap_max, gap)


@rule
def emit(replica: Replica, slot: int, tokens: int, now: float) -> float:
    """Return `tokens` to a sequence's client; the gap since the last emission (s), or 0."""
    counters, sequence = replica.counters, replica.sequences[slot]
    outcome = replica.requests[sequence.request]
    gap = 0.0
    if np.isnan(outcome.last_emission):
        outcome.first_emission = now
        outcome.num_first = tokens
    else:
        gap = now - outcome.last_emission
        count_gaps(replica, gap, 1)
    outcome.last_emission = now
    outcome.num_emissions += 1
    outcome.num_tokens += tokens
    # A sequence past its estimate is expected to return no more.
    counters.expected_tokens -= min(tokens, max(0, sequence.expected - sequence.emitted))
    sequence.emitted += tokens
    return gap


@rule
def finish(replica: Replica, slot: int, now: float) -> None:
    """End a sequence's request; return its tokens if due at the end."""
    counters, sequence = replica.counters, replica.sequences[slot]
    if replica.fixed.emit == EMIT_END and sequence.answer > sequence.prompt:
        emit(replica, slot, int(sequence.answer) - int(sequence.prompt), now)
    sequence.finished = True
    counters.expected_tokens -= max(0, sequence.expected - sequence.emitted)
    outcome = replica.requests[sequence.request]
    outcome.finish = now
    outcome.status = COMPLETED
    replica.lists[DONE, counters.num_done] = sequence.request
    counters.num_done += 1
    counters.completed += 1


@rule
def emit_prefixes(replica: Replica, columns: int, now: float) -> None:
    """Return the tokens by which rows' committed prefixes grew, within the first columns."""
    counters = replica.counters
    gaps = 0.0
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        if sequence.finished:
            continue
        prefix = columns
        for p in range(columns):
            if replica.status[slot, p] == MASKED:
                prefix = p
                break
        tokens = min(int(sequence.answer), sequence.start + prefix) - sequence.prompt - sequence.emitted
        if tokens > 0:
            gaps += emit(replica, slot, tokens, now)
    counters.gap_sum += gaps


@rule
def publish(replica: Replica, slot: int, columns: int, now: float) -> float:
    """Return the tokens of complete blocks; the gap since the last emission (s), or 0."""
    sequence, fixed = replica.sequences[slot], replica.fixed
    sequence.unpublished = False
    stop = min(int(sequence.answer), sequence.start + columns)
    tokens = stop - sequence.prompt - sequence.emitted
    gap = 0.0
    if fixed.emit != EMIT_END and tokens > 0:
        gap = emit(replica, slot, tokens, now)
    outcome = replica.requests[sequence.request]
    if np.isnan(outcome.first_block) and stop > sequence.prompt:
        outcome.first_block = now
    return gap


@rule
def has_masks(replica: Replica, slot: int, limit: int) -> bool:
    """Whether the first `limit` columns have masks."""
    for p in range(limit):
        if replica.status[slot, p] == MASKED:
            return True
    return False


@rule
def begin(replica: Replica, kind: int, now: float) -> None:
    """Note the begin of a step, and requests scheduled for the first time."""
    counters = replica.counters
    counters.kind = kind
    counters.now = now
    counters.waiting = counters.num_waiting
    counters.running = counters.num_running
    counters.pages = counters.pages_held
    counters.submitted_then = counters.submitted
    counters.num_steps += 1
    counters.window_q_kv = 0
    counters.window_kv = 0
    if replica.fixed.window > 0:
        _count_windows(replica)
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        if not sequence.prefilled:
            outcome = replica.requests[sequence.request]
            if np.isnan(outcome.scheduled):
                outcome.scheduled = now


@rule
def _count_windows(replica: Replica) -> None:
    """Count keys that rows see in layers with a window."""
    counters, window, single = replica.counters, replica.fixed.window, replica.fixed.block == 1
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        tokens, keys = int(sequence.num_tokens), int(sequence.num_keys)
        counters.window_q_kv += window_pairs(
            tokens, keys, window, single or sequence.phase == PREFILL or sequence.phase == FLUSH
        )
        counters.window_kv += min(keys, window + tokens)


@rule
def count_decode_steps(replica: Replica, committed: int, forwards: int, times: int) -> None:
    """Add `times` decode steps like the one in flight to the totals.

    committed, forwards: of one step; forwards: rows that do not prefill.
    """
    counters = replica.counters
    latency = counters.latency
    counters.num_decode_steps += times
    counters.step_count += times
    for _ in range(times):  # a product would differ in the last bits
        counters.decode_time += latency
        counters.step_sum += latency
    counters.step_min = min(counters.step_min, latency)
    counters.step_max = max(counters.step_max, latency)
    replica.bins[STEP_BINS, time_bin(latency)] += times
    replica.counts[BATCHES, counters.num_rows] += times
    replica.counts[CHUNKS, counters.chunk] += times
    counters.total_tokens += times * (counters.tokens - counters.prefill_tokens)
    counters.total_prefill_tokens += times * counters.prefill_tokens
    counters.total_committed += times * committed
    counters.forwards += times * forwards


@rule
def account(replica: Replica, now: float) -> int:
    """Count the step that ends now; returns committed positions."""
    counters = replica.counters
    counters.stalled = False
    all_committed = 0
    latency = counters.latency
    counters.end = now
    counters.page_time += counters.pages * latency
    counters.max_waiting = max(counters.max_waiting, counters.waiting)
    decode = counters.kind == DECODE_STEP
    total = 0
    retained = 0
    prompts = 0
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        outcome = replica.requests[sequence.request]
        num = 0
        for p in range(replica.committed.shape[1]):
            num += replica.committed[slot, p]
        outcome.num_committed += num
        all_committed += num
        retained += sequence.num_retained
        if decode and sequence.phase != PREFILL:
            total += num
            outcome.num_forwards += 1
            outcome.num_computed += sequence.num_retained
            sequence.fruitless += 1
            if num > 0 or sequence.phase == IDLE:
                sequence.fruitless = 0
            counters.stalled = counters.stalled or sequence.fruitless >= replica.fixed.most_fruitless
        elif decode:
            prompts += 1
        if num > 0 and not sequence.seen_commit:
            sequence.seen_commit = True
            outcome.first_commit = now
    if counters.kind == PREFILL_STEP:
        counters.num_prefill_steps += 1
        counters.prefill_time += latency
        counters.total_prefill_tokens += counters.tokens
        return all_committed
    if counters.evicting:
        counters.total_evicted += counters.tokens - retained
    count_decode_steps(replica, total, counters.num_rows - prompts, 1)
    return all_committed


@rule
def note_progress(replica: Replica, gained: int) -> None:
    """Note commits and completions (`gained`); many steps in a row without any are a stall."""
    counters = replica.counters
    if gained > 0:
        counters.fruitless = 0
    elif counters.num_preempted > 0 or counters.prefill_tokens == 0:
        counters.fruitless += 1
    counters.stalled = counters.stalled or counters.fruitless >= replica.fixed.most_fruitless
