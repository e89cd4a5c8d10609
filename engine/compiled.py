"""The rules of rows.py as compiled loops: the same results, bit for bit (tests/engine/test_compiled.py).

A step's arrays are small, so NumPy's cost is its calls: these loops make one pass over a row instead. benchmarks/
holds the figures. Compilation happens once and is cached on disk. Whoever changes a rule here changes leap.RULES, too.
"""

from typing import Any

import numpy as np
from numba import njit

from .chance import GOLDEN, MIX1, MIX2
from .rows import BLOCK_PASS, CACHED, MASKED, NEIGHBOUR, PENDING

_GOLDEN = np.uint64(GOLDEN)
_MIX1 = np.uint64(MIX1)
_MIX2 = np.uint64(MIX2)
_S27, _S30, _S31, _S54, _S12 = (np.uint64(s) for s in (27, 30, 31, 54, 12))


@njit(cache=True, inline="always")
def _mix(z: Any) -> Any:
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


@njit(cache=True)
def select_window(status: Any, reach: Any, chunk: int, pending_first: bool) -> Any:
    rows, width = status.shape
    window = np.zeros((rows, width), np.bool_)
    for i in range(rows):
        room = chunk
        limit = min(reach[i], width)
        if pending_first:
            for p in range(limit):
                if room == 0:
                    break
                if status[i, p] == PENDING:
                    window[i, p] = True
                    room -= 1
            for p in range(limit):
                if room == 0:
                    break
                if status[i, p] == MASKED:
                    window[i, p] = True
                    room -= 1
        else:
            for p in range(limit):
                if room == 0:
                    break
                if status[i, p] != CACHED:
                    window[i, p] = True
                    room -= 1
    return window


@njit(cache=True)
def visible_keys(status: Any, window: Any, block_length: int, listed: bool) -> Any:
    rows, width = status.shape
    num_tokens = np.zeros(rows, np.int32)
    keys = np.zeros(rows, np.int32)
    pairs = np.zeros(rows, np.int64)
    for i in range(rows):
        last = 0
        first_keys = 0
        first_queries = 0
        next_keys = 0
        next_queries = 0
        for p in range(width):
            if window[i, p]:
                last = p + 1
                if p < block_length:
                    first_queries += 1
                else:
                    next_queries += 1
            if window[i, p] or status[i, p] == CACHED:
                if p < block_length:
                    first_keys += 1
                else:
                    next_keys += 1
        num = first_queries + next_queries
        num_tokens[i] = num
        if listed:
            all_keys = first_keys + next_keys
            keys[i] = all_keys if next_queries > 0 else first_keys
            pairs[i] = first_queries * first_keys + next_queries * all_keys
        else:
            keys[i] = last
            pairs[i] = num * last
    return num_tokens, keys, pairs


@njit(cache=True)
def apply(status: Any, evaluations: Any, slots: Any, window: Any, committed: Any, block_length: int, rule: int) -> Any:
    rows, width = window.shape
    masks_left = np.zeros(rows, np.int32)
    open_left = np.zeros(rows, np.int32)
    for i in range(rows):
        s = slots[i]
        if rule == BLOCK_PASS:
            whole = False
            for p in range(width):
                if window[i, p]:
                    whole = True
                    if status[s, p] == MASKED:
                        evaluations[s, p] += 1
            for p in range(block_length):
                if status[s, p] == MASKED:
                    whole = False
            if whole:
                for p in range(block_length):
                    status[s, p] = CACHED
        else:
            # Left to right: position p + 1 is still as it was when p asks for it.
            for p in range(width):
                if window[i, p]:
                    if status[s, p] == MASKED:
                        evaluations[s, p] += 1
                    elif status[s, p] == PENDING and (
                        rule != NEIGHBOUR or p == width - 1 or status[s, p + 1] != MASKED
                    ):
                        status[s, p] = CACHED
        for p in range(width):
            if committed[i, p]:
                status[s, p] = PENDING
        for p in range(block_length):
            if status[s, p] == MASKED:
                masks_left[i] += 1
            if status[s, p] != CACHED:
                open_left[i] += 1
    return masks_left, open_left


@njit(cache=True)
def count_prefixes(status: Any, window: Any, committed: Any, pending_counts: bool, counts: Any, sums: Any) -> None:
    rows, width = window.shape
    for i in range(rows):
        any_mask = False
        for p in range(width):
            if window[i, p] and status[i, p] == MASKED:
                any_mask = True
                break
        if not any_mask:
            continue
        rank = 0
        commits = 0
        seen_mask = False
        for p in range(width):
            if not window[i, p]:
                continue
            masked = status[i, p] == MASKED
            if masked:
                seen_mask = True
            if not masked and not pending_counts:
                continue
            rank += 1
            if committed[i, p]:
                commits += 1
            counts[rank] += 1
            if commits == 0 and seen_mask:
                sums[rank] += 1
            else:
                sums[rank] += commits


@njit(cache=True)
def draw_commits(
    status: Any, evaluations: Any, window: Any, block_start: Any, last_block: Any, num_padding: Any, keys: Any,
    request_factor: Any, odds: Any, stage: Any, block_factors: Any, step_factors: Any, block_length: int,
) -> Any:  # fmt: skip
    rows, width = status.shape
    committed = np.zeros((rows, width), np.bool_)
    for i in range(rows):
        frontier = -1
        for p in range(width):
            if status[i, p] == MASKED:
                frontier = p
                break
        if frontier < 0:
            continue
        at = np.uint64(block_start[i] + frontier)
        h = _mix((keys[i, 1] + at * _GOLDEN) ^ (np.uint64(evaluations[i, frontier]) * _MIX1))
        step = step_factors[np.int64(h >> _S54)]
        best = -1.0
        best_p = -1
        passed = False
        for offset in range(0, width, block_length):
            done = block_length
            computed = False
            for p in range(offset, offset + block_length):
                if status[i, p] == MASKED:
                    done -= 1
                    if window[i, p]:
                        computed = True
            if not computed:
                continue
            block = block_start[i] // block_length + offset // block_length
            padding = block > last_block[i] - num_padding[i]
            h = _mix(keys[i, 2] + np.uint64(block) * _GOLDEN)
            theta = request_factor[i] * block_factors[np.int64(h >> _S54)] * step * stage[done]
            for p in range(offset, offset + block_length):
                if status[i, p] != MASKED or not window[i, p]:
                    continue
                if padding:
                    score = np.inf
                else:
                    h = _mix(
                        (keys[i, 0] + np.uint64(block_start[i] + p) * _GOLDEN) ^ (np.uint64(evaluations[i, p]) * _MIX1)
                    )
                    u = (np.float64(h >> _S12) + 0.5) * 2.0**-52
                    score = odds[p - frontier] * theta * ((1.0 - u) / u)
                if score > 1.0:
                    committed[i, p] = True
                    passed = True
                if score > best:
                    best = score
                    best_p = p
        if not passed and best_p >= 0:
            committed[i, best_p] = True
    return committed


@njit(cache=True)
def retain(status: Any, window: Any, delta: Any, budgets: Any, progress: Any, sample_deviation: bool) -> Any:
    rows, width = window.shape
    keep = window.copy()
    spots = np.empty(width, np.int64)
    selected = np.empty(width, np.bool_)
    for i in range(rows):
        num = 0
        for p in range(width):
            if window[i, p] and status[i, p] == MASKED:
                spots[num] = p
                num += 1
        if num <= budgets[i]:
            continue
        total = 0.0
        for j in range(num):
            total += np.float64(delta[i, spots[j]])
        mean = total / num
        total = 0.0
        for j in range(num):
            off = np.float64(delta[i, spots[j]]) - mean
            total += off * off
        high = mean + np.sqrt(total / (num - 1 if sample_deviation else num))
        wanted = 0
        for j in range(num):
            if np.float64(delta[i, spots[j]]) >= high:
                wanted += 1
        wanted = max(wanted, budgets[i])
        rightmost = -1
        for j in range(num):
            own = delta[i, spots[j]]
            before = 0  # of higher rank: greater, or as great and further left
            for k in range(num):
                other = delta[i, spots[k]]
                if other > own or (other == own and k < j):
                    before += 1
            selected[j] = before < wanted
        for j in range(num):
            kept = selected[j] or (j + 1 < num and selected[j + 1] and spots[j + 1] == spots[j] + 1)
            keep[i, spots[j]] = kept
            if kept:
                rightmost = spots[j]
        for j in range(num):
            if progress[i] < spots[j] < rightmost:
                keep[i, spots[j]] = True
    return keep


@njit(cache=True)
def draw_deltas(
    status: Any, window: Any, decodable: Any, requests: Any, block_start: Any, evaluations: Any, stream: Any,
    quantiles: Any, deltas: Any,
) -> Any:  # fmt: skip
    rows, width = window.shape
    out = np.zeros((rows, width), np.float32)
    begin = _mix(_GOLDEN ^ (stream * _MIX2))
    for i in range(rows):
        frontier = -1
        row = _mix((begin + _GOLDEN) ^ (np.uint64(requests[i]) * _MIX2))
        for p in range(width):
            if not window[i, p] or status[i, p] != MASKED:
                continue
            if frontier < 0:
                frontier = p
            h = _mix((row + _GOLDEN) ^ (np.uint64(block_start[i] + p) * _MIX2))
            h = _mix((h + _GOLDEN) ^ (np.uint64(evaluations[i, p]) * _MIX2))
            normal = quantiles[np.int64(h >> _S54)]
            own = deltas[0] + deltas[1] * normal if decodable[i, p] else deltas[2] + deltas[3] * normal
            out[i, p] = np.float32(own - deltas[4] * (p - frontier))
    return out


@njit(cache=True)
def budget(status: Any, window: Any, num_decoded: Any, num_steps: Any, alpha: float) -> Any:
    rows, width = window.shape
    out = np.zeros(rows, np.int64)
    more = False  # masks than the budget, somewhere
    for i in range(rows):
        num = 0
        for p in range(width):
            if window[i, p] and status[i, p] == MASKED:
                num += 1
        mean = num_decoded[i] / num_steps[i] if num_steps[i] else 1.0
        wanted = max(1, int(np.ceil(max(mean, 1.0) * alpha)))
        out[i] = min(num, wanted)
        more = more or num > wanted
    return out, more
