"""Oracle of the rules on a block's positions: windows, visible keys, states, prefix counts, commits; NumPy over rows.

A row is a running sequence, a column a position of its current block (and of the next one where streaming leaves it).
"""

import numpy as np
import numpy.typing as npt

from dsim.engine.chance import GOLDEN, MIX1, mix, uniform
from dsim.engine.draw import BLOCK_FACTORS, STEP_FACTORS, Draws
from dsim.engine.state import CACHED, MASKED, PENDING

from .chance import pick, streams

# What makes a committed position's KV right, that is CACHED.
BLOCK_PASS = 0  # a pass over the whole block, once no mask is left (LMDeploy, block-diffusion.md 1.5)
DELAYED = 1  # having been computed once as a committed token (elastic-chunking.md 6.2)
NEIGHBOUR = 2  # ... while its right neighbour was committed too (FOCUS's DC+, focus.md 3.6)

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.uint16]


def select_window(status: Bytes, reach: Ints, chunk: int, pending_first: bool) -> Bools:
    """The positions a step computes: at most `chunk` of a row's first `reach` positions that are not cached.

    pending_first (W2): committed positions whose KV is stale, then the leftmost masks. Otherwise (W1): in order.
    """
    candidates = (status != CACHED) & (np.arange(status.shape[1]) < reach[:, None])
    if not pending_first:
        in_order: Bools = candidates & (np.cumsum(candidates, axis=1) <= chunk)
        return in_order
    pending = candidates & (status == PENDING)
    masked = candidates & (status == MASKED)
    window: Bools = pending & (np.cumsum(pending, axis=1) <= chunk)
    room = chunk - window.sum(axis=1)
    window |= masked & (np.cumsum(masked, axis=1) <= room[:, None])
    return window


def visible_keys(status: Bytes, window: Bools, block_length: int, listed: bool) -> tuple[Ints, Ints, Ints]:
    """Positions computed, keys visible beyond the history, and sum of query-key pairs beyond the history, per row.

    listed: a query sees the cached and the computed positions of its own block and of those before it.
    Otherwise it sees every position up to the last computed one (a kernel that knows only a KV length).
    """
    num_tokens = window.sum(axis=1)
    if not listed:
        last = status.shape[1] - np.argmax(window[:, ::-1], axis=1)
        keys = np.where(num_tokens > 0, last, 0)
        return num_tokens, keys, num_tokens * keys
    seen = window | (status == CACHED)
    first_keys = seen[:, :block_length].sum(axis=1)
    first_queries = window[:, :block_length].sum(axis=1)
    # The next block's cached positions are read only by a query of that block.
    next_queries = num_tokens - first_queries
    all_keys = first_keys + seen[:, block_length:].sum(axis=1)
    keys = np.where(next_queries > 0, all_keys, first_keys)
    return num_tokens, keys, first_queries * first_keys + next_queries * all_keys


def settle(status: Bytes, evaluations: Counts, window: Bools, block_length: int, rule: int) -> tuple[Bytes, Counts]:
    """States and evaluations once `window` has been computed, before anything of it commits."""
    masked = status == MASKED
    after = status.copy()
    if rule == BLOCK_PASS:
        whole = ~masked[:, :block_length].any(axis=1) & window.any(axis=1)
        after[:, :block_length][whole[:, None] & window[:, :block_length]] = CACHED
    else:
        right = window & (status == PENDING)
        if rule == NEIGHBOUR:
            right[:, :-1] &= ~masked[:, 1:]
        after[right] = CACHED
    return after, evaluations + (window & masked)


def count_prefixes(status: Bytes, window: Bools, committed: Bools, pending_counts: bool) -> tuple[Ints, Ints]:
    """For m = 0, 1, 2, ...: rows that computed at least m positions, and what their first m committed in all.

    At least one each where a mask is among them. Positions are counted in the window's masks, or with `pending_counts`
    in the whole window, in order of position.
    """
    counts, sums = np.zeros((2, window.shape[1] + 1), np.int64)
    masked = window & (status == MASKED)
    member = window if pending_counts else masked
    rank = np.cumsum(member, axis=1)
    for row in range(len(member)):
        size = int(rank[row, -1])
        if not size or not masked[row].any():
            continue
        ranks = np.arange(1, size + 1)
        commits = np.searchsorted(rank[row][committed[row]], ranks, side="right")
        masks = np.searchsorted(rank[row][masked[row]], ranks, side="right")
        counts[1 : size + 1] += 1
        sums[1 : size + 1] += np.maximum(commits, masks > 0)
    return counts, sums


def draw_commits(
    status: Bytes, evaluations: Counts, window: Bools, block_start: Ints, requests: Ints, d: Draws
) -> Bools:  # fmt: skip
    """The masks of `window` that commit: those whose score passes 1, and at least the best (see commits.py)."""
    rows, width = status.shape
    block_length = len(d.stage) - 1
    keys, own = streams(d, requests), d.requests[requests]
    last_block, num_padding, request_factor = (own[name] for name in ("last_block", "num_padding", "factor"))
    masked = status == MASKED
    frontier = np.argmax(masked, axis=1)
    evaluated = np.take_along_axis(evaluations, frontier[:, None], axis=1)[:, 0]
    step = d.factors[STEP_FACTORS][pick(keys[:, 1], block_start + frontier, evaluated)]
    columns = np.arange(width)
    first = block_start // block_length
    score = np.zeros((rows, width))
    for offset in range(0, width, block_length):
        part = slice(offset, offset + block_length)
        block = first + offset // block_length
        factor = d.factors[BLOCK_FACTORS][pick(keys[:, 2], block, np.zeros(rows))]
        done = block_length - masked[:, part].sum(axis=1)
        theta = request_factor * factor * step * d.stage[done]
        distance = np.maximum(columns[part] - frontier[:, None], 0)
        position = (block_start[:, None] + columns[part]).astype(np.uint64)
        times = evaluations[:, part].astype(np.uint64)
        draw = uniform(mix((keys[:, :1] + position * np.uint64(GOLDEN)) ^ (times * np.uint64(MIX1))))
        score[:, part] = d.odds[distance] * theta[:, None] * ((1.0 - draw) / draw)
        score[block > last_block - num_padding, part] = np.inf
    score[~(masked & window)] = -1.0
    committed: Bools = score > 1.0
    lone = ~committed.any(axis=1) & (masked & window).any(axis=1)
    committed[lone, np.argmax(score, axis=1)[lone]] = True
    return committed
