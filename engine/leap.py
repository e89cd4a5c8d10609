"""Many decode steps in one compiled call, where the engine has nothing to decide between them.

While no request arrives, none finishes and every page that is needed is there, the batch stays as it is, and a step is
arithmetic alone. `leap` runs such steps with the same results as schedule, step model and commit one at a time, bit for
bit (tests/engine/test_leap.py). It stops before the step that would begin at the horizon or beyond, for then the world
outside may have changed; or, where that world looks at the engine's state, before the one that would end there.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .compiled import (
    apply,
    budget,
    count_prefixes,
    draw_commits,
    draw_deltas,
    retain,
    select_window,
    visible_keys,
)  # fmt: skip
from .granularity import TINY
from .histogram import FIRST_BIN, NUM_BINS, SHIFT
from .latency import POWERS_TO, LatencyModel
from .rows import BLOCK_PASS, CACHED, MASKED

# The hash of compiled.py (a test holds it): compiled code is cached by the contents of the file that calls, not of
# those that are called, and a rule of yesterday would live on in here.
RULES = "d2952a4341d0"

COMPLETED, DENOISE, FLUSH, IDLE = 0, 1, 2, 3  # STATUSES.index("completed"), and Phase
EMIT_BLOCK, EMIT_STEP, EMIT_END = 0, 1, 2
SCOPE_BLOCK, SCOPE_CARRY = 0, 2  # engine.py's SCOPES.index


class Requests(NamedTuple):
    """Columns of the request table that decode steps write."""

    status: Any
    first_commit: Any
    first_block: Any
    first_emission: Any
    last_emission: Any
    finish: Any
    num_first: Any
    num_tokens: Any
    num_emissions: Any
    num_forwards: Any
    num_committed: Any
    num_computed: Any


class Draws(NamedTuple):
    """What CommitDraws holds."""

    last_block: Any
    num_padding: Any
    keys: Any
    request_factor: Any
    odds: Any
    stage: Any
    block_factors: Any
    step_factors: Any
    importance: Any  # the stream of importance deltas
    quantiles: Any
    deltas: Any  # FocusDeltas' fields


class Setting(NamedTuple):
    """What a policy and a replica fix."""

    autoregressive: bool
    block: int
    width: int
    page: int
    num_pages: int
    rule: int
    pending_first: bool
    listed: bool
    sample_block: bool
    obs: bool
    emit: int
    group_steps: int
    prealloc: int
    elastic: bool
    robust: bool
    memory: int
    cold_start: int
    probe_every: int
    hysteresis: float
    focus: bool
    alpha: float
    scope: int
    sample_deviation: bool
    exact_block: bool


class Cost(NamedTuple):
    """A latency model's numbers."""

    tokens: Any  # knots
    seconds: Any
    slope: float
    attention: float
    kv_read: float
    head: float
    sample: float
    launch: float
    host_step: float
    host_request: float
    early: float
    eviction: float
    graph_tokens: int


def cost_of(model: LatencyModel) -> Cost:
    """A latency model as arrays and numbers."""
    knots = np.array(model.knots, np.float64)
    numbers = {name: float(getattr(model, name)) for name in Cost._fields[2:-1]}
    return Cost(knots[:, 0].copy(), knots[:, 1].copy(), graph_tokens=model.graph_tokens, **numbers)


NO_DRAWS = Draws(  # an autoregressive model's
    np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros((0, 3), np.uint64), np.zeros(0), np.zeros(0), np.zeros(0),
    np.zeros(0), np.zeros(0), np.uint64(0), np.zeros(0), np.zeros(0),
)  # fmt: skip


class Tally(NamedTuple):
    """What a leap adds up."""

    times: Any  # [8]: decode time, page time; sum, min, max of step latencies; sum, min, max of gaps
    numbers: Any  # [9]: tokens, committed, steps, gaps, pages held, outstanding tokens, observed, decode steps, evicted
    step_bins: Any
    gap_bins: Any
    chunks: Any  # [width + 1] steps at each chunk


# What a leap writes down of each step, beside its start and latency.
LEAP_COLUMNS = (
    "chunk", "tokens", "sum_q_kv", "sum_kv", "head_rows", "sampled_rows", "committed", "pages", "evicting", "evicted",
    "evicted_q_kv", "evicted_kv", "evicted_sampled",
)  # fmt: skip


class Steps(NamedTuple):
    """Room for the journal: a row a step, then rows of sequences, step after step."""

    reals: Any  # [steps, 2] start, latency
    wholes: Any  # [steps, 13] LEAP_COLUMNS
    requests: Any
    phases: Any
    num_tokens: Any
    window: Any  # [rows, words]
    commits: Any
    evictions: Any


@njit(cache=True)
def _layers(c: Any, tokens: int, pairs: int, keys: int) -> Any:
    x = float(tokens)
    x0 = c.tokens[0]
    y0 = c.seconds[0]
    device = y0
    if x > x0:
        found = False
        for k in range(1, len(c.tokens)):
            x1 = c.tokens[k]
            y1 = c.seconds[k]
            if x <= x1:
                device = y0 + (y1 - y0) * ((x - x0) / (x1 - x0))
                found = True
                break
            x0 = x1
            y0 = y1
        if not found:
            device = y0 + c.slope * (x - x0)
    return device + c.attention * pairs + c.kv_read * keys


@njit(cache=True)
def _latency(c: Any, tokens: int, pairs: int, keys: int, head: int, sampled: int, batch: int) -> Any:
    launch = c.launch
    if 0 < tokens <= c.graph_tokens:  # a captured graph, padded to its bucket
        size = 1
        if tokens <= POWERS_TO:
            while size < tokens:
                size *= 2
        else:
            size = (tokens + (POWERS_TO - 1)) // POWERS_TO * POWERS_TO
        more = size - tokens
        tokens, head, sampled = tokens + more, head + more, sampled + more
        launch = 0.0
    device = _layers(c, tokens, pairs, keys) + c.head * head + c.sample * sampled
    return max(launch, device) + c.host_step + c.host_request * batch


@njit(cache=True)
def _latency_evicting(
    c: Any, tokens: int, pairs: int, keys: int, left: int, pairs_left: int, keys_left: int, sampled: int, batch: int
) -> Any:
    layers = c.early * _layers(c, tokens, pairs, keys) + (1.0 - c.early) * _layers(c, left, pairs_left, keys_left)
    device = layers + c.head * left + c.sample * sampled
    return max(c.launch, device) + c.host_step + c.host_request * batch + c.eviction


@njit(cache=True)
def _bin(value: float, scratch: Any) -> Any:
    scratch[0] = value
    found = (scratch.view(np.int64)[0] >> SHIFT) - FIRST_BIN
    return min(max(found, 0), NUM_BINS - 1)


@njit(cache=True)
def _choose(s: Any, curve: Any, chunks: Any, latency: Any, last: int, observed: int, step: int) -> Any:
    n = len(chunks)
    if observed < s.cold_start or (s.probe_every > 0 and step % s.probe_every == 0):
        return chunks[n - 1]
    size = len(curve) - 1
    slots = np.empty(size + 1)
    top = -np.inf
    for m in range(size + 1):
        top = max(top, m + curve[m])
        slots[m] = top
    rate = np.empty(n)
    best = 0
    for k in range(n):
        c = chunks[k]
        if s.robust:
            below = min(max(np.searchsorted(slots, c, side="right") - 1, 0), size - 1)
            masks = below + (c - slots[below]) / max(slots[below + 1] - slots[below], TINY)
            expected = c - min(masks, float(size))
        else:
            expected = curve[c]
        rate[k] = expected / latency[k]
        if rate[k] > rate[best]:
            best = k
    if s.hysteresis > 0.0 and last > 0:
        held = np.searchsorted(chunks, last)
        if rate[best] <= rate[held] * (1 + s.hysteresis):
            return last
    return chunks[best]


@njit(cache=True)
def _observe(s: Any, curve: Any, counts: Any, sums: Any, observed: int) -> int:
    size = len(curve) - 1
    top = 0
    for m in range(size, 0, -1):
        if counts[m] != 0:
            top = m
            break
    if top == 0:
        return observed
    before = curve[top]
    weight = 1.0 / min(observed + 1, s.memory)
    for m in range(1, top + 1):
        curve[m] += weight * (sums[m] / counts[m] - curve[m])
    if s.robust and top < size:
        ratio = curve[top] / before
        for m in range(top + 1, size + 1):
            curve[m] *= ratio
    return observed + 1


@njit(cache=True)
def _emit(q: Any, r: Any, tally: Any, slots: Any, tokens: Any, now: float, scratch: Any) -> None:
    """Row i gets tokens[i] more, where that is above zero."""
    gaps = 0.0
    for i in range(len(slots)):
        if tokens[i] <= 0:
            continue
        slot = slots[i]
        index = q.request[slot]
        last = r.last_emission[index]
        if np.isnan(last):
            r.first_emission[index] = now
            r.num_first[index] = tokens[i]
        else:
            gap = now - last
            tally.gap_bins[_bin(gap, scratch)] += 1
            tally.numbers[3] += 1
            gaps += gap
            tally.times[6] = min(tally.times[6], gap)
            tally.times[7] = max(tally.times[7], gap)
        r.last_emission[index] = now
        r.num_emissions[index] += 1
        r.num_tokens[index] += tokens[i]
        q.emitted[slot] += tokens[i]
        tally.numbers[5] -= tokens[i]
    tally.times[5] += gaps


@njit(cache=True)
def _finish(q: Any, r: Any, tally: Any, s: Any, slots: Any, done: Any, now: float, scratch: Any) -> None:
    """The rows marked `done` are over."""
    if s.emit == EMIT_END:
        tokens = np.zeros(len(slots), np.int32)
        for i in range(len(slots)):
            if done[i]:
                tokens[i] = q.end[slots[i]] - q.prompt[slots[i]]
        _emit(q, r, tally, slots, tokens, now, scratch)
    for i in range(len(slots)):
        if done[i]:
            index = q.request[slots[i]]
            q.finished[slots[i]] = True
            r.finish[index] = now
            r.status[index] = COMPLETED


@njit(cache=True)
def _transitions(
    q: Any, r: Any, tally: Any, s: Any, slots: Any, masks_left: Any, open_left: Any, now: float, scratch: Any
) -> int:
    """Publish, finish and advance, as Engine._commit_blocks does; returns the rows that finished."""
    n = len(slots)
    block = s.block
    tokens = np.zeros(n, np.int32)
    if s.emit == EMIT_STEP:
        for i in range(n):
            slot = slots[i]
            prefix = block
            for p in range(block):
                if q.status[slot, p] == MASKED:
                    prefix = p
                    break
            stop = min(q.end[slot], q.start[slot] + prefix)
            tokens[i] = 0 if q.finished[slot] else stop - q.prompt[slot] - q.emitted[slot]
        _emit(q, r, tally, slots, tokens, now, scratch)
    total = 0
    while True:
        done = np.zeros(n, np.bool_)
        any_complete = False
        for i in range(n):
            slot = slots[i]
            tokens[i] = 0
            if masks_left[i] != 0 or not q.unpublished[slot] or q.finished[slot]:
                continue
            any_complete = True
            q.unpublished[slot] = False
            index = q.request[slot]
            stop = min(q.end[slot], q.start[slot] + block)
            tokens[i] = stop - q.prompt[slot] - q.emitted[slot]
            if np.isnan(r.first_block[index]) and stop > q.prompt[slot]:
                r.first_block[index] = now
            if stop >= q.end[slot]:
                done[i] = True
                total += 1
        if any_complete:
            if s.emit != EMIT_END:
                _emit(q, r, tally, slots, tokens, now, scratch)
            _finish(q, r, tally, s, slots, done, now, scratch)
        if s.width > block:
            any_last = False
            for i in range(n):
                slot = slots[i]
                tokens[i] = 0
                done[i] = False
                if q.unpublished[slot] or q.finished[slot] or q.start[slot] + 2 * block < q.end[slot]:
                    continue
                complete = True
                for p in range(s.width):
                    if q.status[slot, p] == MASKED:
                        complete = False
                        break
                if complete:
                    any_last = True
                    done[i] = True
                    total += 1
                    tokens[i] = q.end[slot] - q.prompt[slot] - q.emitted[slot]
            if any_last:
                if s.emit != EMIT_END:
                    _emit(q, r, tally, slots, tokens, now, scratch)
                _finish(q, r, tally, s, slots, done, now, scratch)
        moved = False
        for i in range(n):
            slot = slots[i]
            if open_left[i] != 0 or q.finished[slot]:
                continue
            moved = True
            q.start[slot] += block
            for p in range(s.width - block):
                q.status[slot, p] = q.status[slot, p + block]
                q.evaluations[slot, p] = q.evaluations[slot, p + block]
            for p in range(s.width - block, s.width):
                q.status[slot, p] = MASKED
                q.evaluations[slot, p] = 0
            q.unpublished[slot] = True
            q.progress[slot] = -1
            if s.focus:
                if s.scope == SCOPE_BLOCK:
                    q.decoded[slot] = 0
                    q.decode_steps[slot] = 0
                else:
                    q.carried[slot] = s.scope == SCOPE_CARRY
        if not moved or s.width == block:
            return total
        for i in range(n):
            masks_left[i] = 0
            open_left[i] = 0
            for p in range(block):
                if q.status[slots[i], p] == MASKED:
                    masks_left[i] += 1
                if q.status[slots[i], p] != CACHED:
                    open_left[i] += 1


@njit(cache=True)
def _learn_yield(q: Any, slot: int, retained: Any, committed: Any) -> None:
    """What FOCUS goes by, as Engine._learn_yield has it."""
    num = 0
    for p in range(len(retained)):
        if retained[p]:
            q.progress[slot] = max(q.progress[slot], p)
        if committed[p]:
            num += 1
    if num:
        if q.carried[slot]:
            q.decoded[slot] = 0
            q.decode_steps[slot] = 0
            q.carried[slot] = False
        q.decoded[slot] += num
        q.decode_steps[slot] += 1


@njit(cache=True)
def leap(
    now: float, horizon: float, slots: Any, chunk: int, q: Any, r: Any, d: Any, s: Any, cost: Any, tally: Any,
    curve: Any, chunks: Any, latencies: Any, steps: Any, recording: bool, loops_left: int, most: int,
    cross: bool, watched: bool,
) -> Any:  # fmt: skip
    """Run decode steps of `slots` from `now`, at most `most`, of a frozen group with `loops_left` steps to go.

    With `cross` the next group begins where one ends, as long as it has the same rows. `watched`: no step may be in
    flight at the horizon. Returns the time, the chunk, the steps run, the requests finished with the last, and the
    steps that its group has left.
    """
    n = len(slots)
    block = s.block
    width = s.width
    scratch = np.zeros(1)
    room = len(steps.reals)
    rows_room = len(steps.requests)
    at_row = 0
    num_steps = 0
    reach = np.full(n, width, np.int32)
    start = np.empty(n, np.int32)
    last_block = np.empty(n, np.int32)
    num_padding = np.empty(n, np.int32)
    keys = np.empty((n, 3), np.uint64)
    factor = np.empty(n)
    if not s.autoregressive:
        for i in range(n):
            index = q.request[slots[i]]
            last_block[i] = d.last_block[index]
            num_padding[i] = d.num_padding[index]
            factor[i] = d.request_factor[index]
            for k in range(3):
                keys[i, k] = d.keys[index, k]
    status = np.empty((n, width), np.uint8)
    evaluations = np.empty((n, width), np.uint16)
    counts = np.zeros(len(curve), np.int64)
    sums = np.zeros(len(curve), np.int64)
    # An autoregressive step computes and commits one position, whatever its state says.
    window = np.ones((n, width), np.bool_)
    committed = np.ones((n, width), np.bool_)
    num = np.full(n, block, np.int32)
    beyond = num
    ones = np.ones(n, np.int32)
    done = np.zeros(n, np.bool_)
    idle = np.zeros(n, np.bool_)  # finished before, and computed because the batch is frozen
    num_idle = 0
    planned = num
    who = np.zeros(n, np.int32)
    decoded = np.zeros(n, np.int32)
    decode_steps = np.zeros(n, np.int32)
    progress = np.zeros(n, np.int32)
    for i in range(n):
        if q.finished[slots[i]]:
            idle[i] = True
            num_idle += 1
            window[i] = False
            committed[i] = False
    while num_steps < most and (not recording or (num_steps < room and at_row + n <= rows_room)):
        if not now < horizon:
            break
        new_group = loops_left == 0
        if new_group:
            if num_idle or not (cross or num_steps == 0):
                break
            # Pages, as Engine._make_room takes them when there is room for all.
            more = 0
            for i in range(n):
                slot = slots[i]
                canvas = (q.end[slot] + (block - 1)) // block * block
                need = (min(q.start[slot] + width + s.prealloc, canvas) + (s.page - 1)) // s.page
                if need > q.pages[slot]:
                    more += need - q.pages[slot]
            if tally.numbers[4] + more > s.num_pages:
                break
            if more:
                for i in range(n):
                    slot = slots[i]
                    canvas = (q.end[slot] + (block - 1)) // block * block
                    need = (min(q.start[slot] + width + s.prealloc, canvas) + (s.page - 1)) // s.page
                    q.pages[slot] = max(need, q.pages[slot])
                tally.numbers[4] += more
        held = tally.numbers[4]

        tokens = 0
        pairs = 0
        sum_keys = 0
        for i in range(n):
            start[i] = q.start[slots[i]]
        if s.autoregressive:
            tokens = n
            for i in range(n):
                sum_keys += start[i] + 1
            pairs = sum_keys
        else:
            if s.elastic:
                chunk = _choose(s, curve, chunks, latencies, chunk, tally.numbers[6], tally.numbers[7])
            for i in range(n):
                slot = slots[i]
                for p in range(width):
                    status[i, p] = q.status[slot, p]
                    evaluations[i, p] = q.evaluations[slot, p]
            if s.rule == BLOCK_PASS:
                for i in range(n):
                    tokens += block
                    pairs += block * (start[i] + block)
                    sum_keys += start[i] + block
            else:
                if s.obs:
                    for i in range(n):
                        reach[i] = block if start[i] + block >= q.end[slots[i]] else width
                window = select_window(status, reach, chunk, s.pending_first)
                if s.exact_block:
                    for i in range(n):
                        whole = True
                        for p in range(width):
                            if status[i, p] == MASKED:
                                whole = False
                                break
                        if whole:
                            window[i] = True
                num, beyond, more_pairs = visible_keys(status, window, block, s.listed)
                for i in range(n):
                    if idle[i]:
                        window[i] = False
                    tokens += num[i]
                    pairs += num[i] * np.int64(start[i]) + more_pairs[i]
                    sum_keys += start[i] + beyond[i]
        sampled = n * block if s.sample_block else tokens
        planned = num
        left, pairs_left, keys_left = tokens, pairs, sum_keys
        retained = window
        sampled_left = sampled
        evicting = False
        if s.focus:
            for i in range(n):
                index = q.request[slots[i]]
                who[i] = index
                decoded[i] = q.decoded[slots[i]]
                decode_steps[i] = q.decode_steps[slots[i]]
                progress[i] = q.progress[slots[i]]
            budgets, evicting = budget(status, window, decoded, decode_steps, s.alpha)
            if evicting:
                decodable = draw_commits(
                    status, evaluations, window, start, last_block, num_padding, keys, factor, d.odds, d.stage,
                    d.block_factors, d.step_factors, block,
                )  # fmt: skip
                delta = draw_deltas(
                    status, window, decodable, who, start, evaluations, d.importance, d.quantiles, d.deltas
                )  # fmt: skip
                retained = retain(status, window, delta, budgets, progress, s.sample_deviation)
                num, beyond, more_pairs = visible_keys(status, retained, block, s.listed)
                left = 0
                pairs_left = 0
                keys_left = 0
                for i in range(n):
                    left += num[i]
                    pairs_left += num[i] * np.int64(start[i]) + more_pairs[i]
                    keys_left += start[i] + beyond[i]
        if evicting:
            sampled_left = sampled if s.sample_block else left
            latency = _latency_evicting(
                cost, tokens, pairs, sum_keys, left, pairs_left, keys_left, sampled_left, n
            )  # fmt: skip
        else:
            latency = _latency(cost, tokens, pairs, sum_keys, tokens, sampled, n)
        end = now + latency
        if watched and not end < horizon:
            break
        if new_group:
            loops_left = s.group_steps
        loops_left -= 1

        if not s.autoregressive:
            committed = draw_commits(
                status, evaluations, retained, start, last_block, num_padding, keys, factor, d.odds, d.stage,
                d.block_factors, d.step_factors, block,
            )  # fmt: skip
        # The accounts.
        num_committed = 0
        for i in range(n):
            slot = slots[i]
            index = q.request[slot]
            mine = 0
            for p in range(width):
                if committed[i, p]:
                    mine += 1
            num_committed += mine
            r.num_committed[index] += mine
            r.num_forwards[index] += 1
            r.num_computed[index] += num[i]
            if mine and not q.seen_commit[slot]:
                q.seen_commit[slot] = True
                r.first_commit[index] = end
        if recording:
            steps.reals[num_steps, 0] = now
            steps.reals[num_steps, 1] = latency
            w = steps.wholes[num_steps]
            w[0] = chunk
            w[1] = tokens
            w[2] = pairs
            w[3] = sum_keys
            w[4] = tokens
            w[5] = sampled
            w[6] = num_committed
            w[7] = held
            w[8] = evicting
            w[9] = tokens - left
            w[10] = pairs - pairs_left
            w[11] = sum_keys - keys_left
            w[12] = sampled - sampled_left
            for i in range(n):
                row = at_row + i
                steps.requests[row] = q.request[slots[i]]
                steps.num_tokens[row] = planned[i]
                masked = s.autoregressive
                for k in range(steps.window.shape[1]):
                    steps.window[row, k] = 0
                    steps.commits[row, k] = 0
                    steps.evictions[row, k] = 0
                for p in range(width):
                    bit = np.uint64(1) << np.uint64(p % 64)
                    if window[i, p]:
                        steps.window[row, p // 64] |= bit
                        if status[i, p] == MASKED:
                            masked = True
                        if not retained[i, p]:
                            steps.evictions[row, p // 64] |= bit
                    if committed[i, p]:
                        steps.commits[row, p // 64] |= bit
                steps.phases[row] = IDLE if idle[i] else DENOISE if masked else FLUSH
            at_row += n
        tally.times[0] += latency
        tally.times[1] += held * latency
        tally.times[2] += latency
        tally.times[3] = min(tally.times[3], latency)
        tally.times[4] = max(tally.times[4], latency)
        tally.step_bins[_bin(latency, scratch)] += 1
        tally.numbers[0] += tokens
        tally.numbers[1] += num_committed
        tally.numbers[2] += 1
        tally.numbers[7] += 1
        tally.numbers[8] += tokens - left
        tally.chunks[chunk] += 1

        finished = 0
        if s.autoregressive:
            for i in range(n):
                q.start[slots[i]] += 1
            if s.emit != EMIT_END:
                _emit(q, r, tally, slots, ones, end, scratch)
            for i in range(n):
                done[i] = q.start[slots[i]] + 1 >= q.end[slots[i]]
                if done[i]:
                    finished += 1
            if finished:
                _finish(q, r, tally, s, slots, done, end, scratch)
        else:
            if s.elastic:
                counts[:] = 0
                sums[:] = 0
                count_prefixes(status, window, committed, not s.robust, counts, sums)
                tally.numbers[6] = _observe(s, curve, counts, sums, tally.numbers[6])
            if s.focus:
                for i in range(n):
                    _learn_yield(q, slots[i], retained[i], committed[i])
            masks_left, open_left = apply(q.status, q.evaluations, slots, window, committed, block, s.rule)
            finished = _transitions(q, r, tally, s, slots, masks_left, open_left, end, scratch)
        num_steps += 1
        now = end
        if finished:
            return now, chunk, num_steps, finished, loops_left
    return now, chunk, num_steps, 0, loops_left
