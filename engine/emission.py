"""The effect of a step's commits on its requests: tokens handed out, requests finished, and the run's counts."""

from typing import Any

import numpy as np

from .histogram import FIRST_BIN, NUM_BINS, SHIFT
from .jit import rule
from .latency import window_pairs
from .state import (
    AT_TOKEN,
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
    ROWS,
    STEP_BINS,
)


@rule
def time_bin(value: Any) -> Any:
    """The bin of a time, in s (histogram.py)."""
    bits = np.float64(value).view(np.int64)
    return min(max((bits >> SHIFT) - FIRST_BIN, 0), NUM_BINS - 1)


@rule
def emit(w: Any, slot: Any, tokens: Any, now: Any) -> Any:
    """Hand `tokens` more to a sequence's client; the gap since the last ones, or 0."""
    c, q = w.c[0], w.q[slot]
    r = w.r[q.request]
    gap = 0.0
    if np.isnan(r.last_emission):
        r.first_emission = now
        r.num_first = tokens
    else:
        gap = now - r.last_emission
        w.bins[GAP_BINS, time_bin(gap)] += 1
        c.gap_count += 1
        c.gap_min = min(c.gap_min, gap)
        c.gap_max = max(c.gap_max, gap)
    r.last_emission = now
    r.num_emissions += 1
    r.num_tokens += tokens
    # A sequence that has returned as many tokens as were expected is expected to return no more.
    c.expected_tokens -= min(tokens, max(0, q.expected - q.emitted))
    q.emitted += tokens
    c.outstanding_tokens -= tokens
    return gap


@rule
def finish(w: Any, slot: Any, now: Any) -> None:
    """End a sequence's request; if its client gets all at the end, it does now."""
    c, q = w.c[0], w.q[slot]
    if w.f[0].emit == EMIT_END and q.answer > q.prompt:
        emit(w, slot, int(q.answer) - int(q.prompt), now)
    q.finished = True
    c.expected_tokens -= max(0, q.expected - q.emitted)
    r = w.r[q.request]
    r.finish = now
    r.status = COMPLETED
    w.lists[DONE, c.num_done] = q.request
    c.num_done += 1
    c.completed += 1


@rule
def emit_prefixes(w: Any, now: Any) -> None:
    """Hand out what the contiguous committed prefix of each row's block has gained."""
    c, block = w.c[0], w.f[0].block
    gaps = 0.0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        if q.finished:
            continue
        prefix = block
        for p in range(block):
            if w.status[slot, p] == MASKED:
                prefix = p
                break
        tokens = min(int(q.answer), q.start + prefix) - q.prompt - q.emitted
        if tokens > 0:
            gaps += emit(w, slot, tokens, now)
    c.gap_sum += gaps


@rule
def publish(w: Any, slot: Any, now: Any) -> Any:
    """Hand out the tokens of a sequence's block that has just become complete; the gap, or 0."""
    q, f = w.q[slot], w.f[0]
    q.unpublished = False
    stop = min(int(q.answer), q.start + q.block)
    tokens = stop - q.prompt - q.emitted
    gap = 0.0
    if f.emit != EMIT_END and tokens > 0:
        gap = emit(w, slot, tokens, now)
    r = w.r[q.request]
    if np.isnan(r.first_block) and stop > q.prompt:
        r.first_block = now
    return gap


@rule
def has_masks(w: Any, slot: Any, upto: Any) -> bool:
    """Whether masks are left in the first `upto` columns, of those before its EOS where that ends a request at once."""
    q = w.q[slot]
    if w.f[0].stops == AT_TOKEN:
        upto = min(upto, int(q.stop) - int(q.start))
    for p in range(upto):
        if w.status[slot, p] == MASKED:
            return True
    return False


@rule
def set_features(w: Any, tokens: Any, qk_pairs: Any, keys: Any, head_rows: Any, sampled_rows: Any, chunk: Any) -> None:
    """Note what the step that is planned will cost by; it prefills and evicts nothing unless its planner says so."""
    c = w.c[0]
    c.tokens = tokens
    c.sum_q_kv = qk_pairs
    c.sum_kv = keys
    c.head_rows = head_rows
    c.sampled_rows = sampled_rows
    c.chunk = chunk
    c.batch = c.num_rows
    c.prefill_tokens = 0
    c.num_forwards = 1
    c.continues = False
    c.first_tokens = 0
    c.evicting = False


@rule
def begin(w: Any, kind: Any, now: Any) -> None:
    """Note the step that begins, and who is scheduled for the first time."""
    c = w.c[0]
    c.kind = kind
    c.now = now
    c.waiting = c.num_waiting
    c.running = c.num_running
    c.pages = c.pages_held
    c.submitted_then = c.submitted
    c.num_steps += 1
    c.window_q_kv = 0
    c.window_kv = 0
    if w.f[0].window > 0:
        _count_windows(w)
    for i in range(c.num_rows):
        q = w.q[w.lists[ROWS, i]]
        if not q.prefilled:
            r = w.r[q.request]
            if np.isnan(r.scheduled):
                r.scheduled = now


@rule
def _count_windows(w: Any) -> None:
    """Note what the step's rows see in layers with a window."""
    c, window, one = w.c[0], int(w.f[0].window), w.f[0].block == 1
    for i in range(c.num_rows):
        q = w.q[w.lists[ROWS, i]]
        tokens, keys = int(q.num_tokens), int(q.num_keys)
        c.window_q_kv += window_pairs(tokens, keys, window, one or q.phase == PREFILL or q.phase == FLUSH)
        c.window_kv += min(keys, window + tokens)


@rule
def account(w: Any, now: Any) -> int:
    """Count the step that ends now, its rows and what they committed; the positions that it committed."""
    c = w.c[0]
    c.stalled = False
    all_committed = 0
    latency = c.latency
    c.end = now
    c.page_time += c.pages * latency
    c.max_waiting = max(c.max_waiting, c.waiting)
    decode = c.kind == DECODE_STEP
    total = 0
    retained = 0
    prompts = 0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        r = w.r[q.request]
        num = 0
        for p in range(w.committed.shape[1]):
            num += w.committed[slot, p]
        r.num_committed += num
        all_committed += num
        retained += q.num_retained
        if decode and q.phase != PREFILL:
            total += num
            r.num_forwards += 1
            r.num_computed += q.num_retained
            q.fruitless = 0 if num > 0 or q.phase == IDLE else q.fruitless + 1
            c.stalled = c.stalled or q.fruitless >= w.f[0].most_fruitless
        elif decode:
            prompts += 1
        if num > 0 and not q.seen_commit:
            q.seen_commit = True
            r.first_commit = now
    if c.kind == PREFILL_STEP:
        c.num_prefill_steps += 1
        c.prefill_time += latency
        c.total_prefill_tokens += c.tokens
        return all_committed
    c.num_decode_steps += 1
    c.decode_time += latency
    c.step_count += 1
    c.step_sum += latency
    c.step_min = min(c.step_min, latency)
    c.step_max = max(c.step_max, latency)
    w.bins[STEP_BINS, time_bin(latency)] += 1
    w.counts[BATCHES, c.num_rows] += 1
    w.counts[CHUNKS, c.chunk] += 1
    c.total_tokens += c.tokens - c.prefill_tokens
    c.total_prefill_tokens += c.prefill_tokens
    if c.evicting:
        c.total_evicted += c.tokens - retained
    c.total_committed += total
    c.forwards += c.num_rows - prompts
    return all_committed


@rule
def note_progress(w: Any, gained: Any, prompts: Any) -> None:
    """Note whether the step brought anything: commits and completions (`gained`), or prompts that are complete now.

    A prefill without either holds what it computed until it is preempted, so that its tokens have a bound.
    """
    c, f = w.c[0], w.f[0]
    if gained > 0:
        c.fruitless = 0
        c.fruitless_tokens = 0
    elif c.num_preempted > 0 or c.prefill_tokens == 0:
        c.fruitless += 1
        c.fruitless_tokens = 0
    else:
        c.fruitless_tokens = 0 if prompts > 0 else c.fruitless_tokens + c.prefill_tokens
    most_tokens = c.outstanding_tokens + f.num_pages * f.page
    c.stalled = c.stalled or c.fruitless >= f.most_fruitless or c.fruitless_tokens > most_tokens
