"""The rules of one step on the blocks of a batch, as plain NumPy over rows; `compiled.py` holds their twins.

A row is a running sequence, a column a position of its current block (and of the next one when streaming leaves the
block). Every function takes and returns whole batches and changes nothing but the arrays it says it changes.
"""

import numpy as np
import numpy.typing as npt

from .chance import GOLDEN, MIX1, mix, uniform

MASKED, PENDING, CACHED = 0, 1, 2  # mask; committed, its KV stale; committed, its KV right

# What makes a committed position's KV right, that is CACHED.
BLOCK_PASS = 0  # a pass over the whole block, once no mask is left (LMDeploy, block-diffusion.md 1.5)
DELAYED = 1  # having been computed once as a committed token (elastic-chunking.md 6.2)
NEIGHBOUR = 2  # ... while its right neighbour was committed too (FOCUS's DC+, focus.md 3.6)

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


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


def visible(status: Bytes, window: Bools, listed: bool) -> Bools:
    """The positions of each row's blocks whose keys are there for queries of the same or a later block.

    listed: the cached and the computed ones. Otherwise every position up to the last computed one.
    """
    if listed:
        cached: Bools = window | (status == CACHED)
        return cached
    # True from the first column to the last one computed.
    upto: Bools = np.logical_or.accumulate(window[:, ::-1], axis=1)[:, ::-1]
    return upto


def visible_keys(
    status: Bytes, window: Bools, block_length: int, listed: bool
) -> tuple[Ints, Ints, npt.NDArray[np.int64]]:
    """Positions computed, keys visible beyond the history, and sum of query-key pairs beyond the history, per row.

    listed: a query sees the cached and the computed positions of its own block and of those before it.
    Otherwise it sees every position up to the last computed one (a kernel that knows only a KV length).
    """
    num_tokens = window.sum(axis=1, dtype=np.int32)
    if not listed:
        last = status.shape[1] - np.argmax(window[:, ::-1], axis=1)
        keys = np.where(num_tokens > 0, last, 0).astype(np.int32)
        return num_tokens, keys, num_tokens.astype(np.int64) * keys
    seen = window | (status == CACHED)
    first_keys = seen[:, :block_length].sum(axis=1, dtype=np.int32)
    first_queries = window[:, :block_length].sum(axis=1, dtype=np.int32)
    # The next block's cached positions are read only by a query of that block.
    next_queries = num_tokens - first_queries
    all_keys = first_keys + seen[:, block_length:].sum(axis=1, dtype=np.int32)
    keys = np.where(next_queries > 0, all_keys, first_keys).astype(np.int32)
    pairs = first_queries.astype(np.int64) * first_keys + next_queries.astype(np.int64) * all_keys
    return num_tokens, keys, pairs


def apply(
    status: Bytes,
    evaluations: npt.NDArray[np.uint16],
    slots: Ints,
    window: Bools,
    committed: Bools,
    block_length: int,
    rule: int,
) -> tuple[Ints, Ints]:
    """Bring `status` and `evaluations` of the rows `slots` up to date with a step that computed `window`.

    Returns the masks and the positions not yet cached that each row's current block has left.
    """
    before = status[slots]
    masked = before == MASKED
    evaluations[slots] += window & masked
    after = before.copy()
    if rule == BLOCK_PASS:
        whole = ~masked[:, :block_length].any(axis=1) & window.any(axis=1)
        after[:, :block_length][whole] = CACHED
    else:
        right = window & (before == PENDING)
        if rule == NEIGHBOUR:
            right[:, :-1] &= ~masked[:, 1:]
        after[right] = CACHED
    after[committed] = PENDING
    status[slots] = after
    block = after[:, :block_length]
    return (block == MASKED).sum(axis=1, dtype=np.int32), (block != CACHED).sum(axis=1, dtype=np.int32)


def count_prefixes(
    status: Bytes, window: Bools, committed: Bools, pending_counts: bool, counts: npt.NDArray[np.int64],
    sums: npt.NDArray[np.int64],
) -> None:  # fmt: skip
    """Add, for m = 1, 2, ...: rows that computed at least m positions (counts[m]) and what their first m committed
    (sums[m], at least one where a mask is among them).

    Positions are counted in the window's masks, or with `pending_counts` in the whole window, in order of position.
    """
    masked = window & (status == MASKED)
    member = window if pending_counts else masked
    rank = np.cumsum(member, axis=1)
    for row in range(len(member)):
        size = int(rank[row, -1]) if rank.shape[1] else 0
        if not size or not masked[row].any():
            continue
        ranks = np.arange(1, size + 1)
        commits = np.searchsorted(rank[row][committed[row]], ranks, side="right")
        masks = np.searchsorted(rank[row][masked[row]], ranks, side="right")
        counts[1 : size + 1] += 1
        sums[1 : size + 1] += np.maximum(commits, masks > 0)


def draw_commits(
    status: Bytes,
    evaluations: npt.NDArray[np.uint16],
    window: Bools,
    block_start: Ints,
    last_block: Ints,
    num_padding: Ints,
    keys: npt.NDArray[np.uint64],
    request_factor: npt.NDArray[np.float64],
    odds: npt.NDArray[np.float64],
    stage: npt.NDArray[np.float64],
    block_factors: npt.NDArray[np.float64],
    step_factors: npt.NDArray[np.float64],
    block_length: int,
) -> Bools:
    """The masks of `window` that commit: those whose score passes 1, and at least the best (see commits.py).

    keys: [rows, 3], each row's stream of draws for commits, steps and blocks. odds: [width] by distance from the
    frontier. stage: [block_length + 1] by committed positions of the block. The factor tables hold 1024 quantiles.
    """
    rows, width = status.shape
    masked = status == MASKED
    frontier = np.argmax(masked, axis=1)
    at_frontier = (block_start + frontier).astype(np.uint64)
    evaluated = np.take_along_axis(evaluations, frontier[:, None], axis=1)[:, 0].astype(np.uint64)
    step = step_factors[_pick(keys[:, 1], at_frontier, evaluated)]
    columns = np.arange(width)
    first = (block_start // block_length).astype(np.int64)
    score = np.zeros((rows, width))
    for offset in range(0, width, block_length):
        part = slice(offset, offset + block_length)
        block = first + offset // block_length
        factor = block_factors[_pick(keys[:, 2], block.astype(np.uint64), np.zeros(rows, np.uint64))]
        done = block_length - masked[:, part].sum(axis=1)
        theta = request_factor * factor * step * stage[done]
        distance = np.maximum(columns[part] - frontier[:, None], 0)
        position = (block_start[:, None] + columns[part]).astype(np.uint64)
        times = evaluations[:, part].astype(np.uint64)
        draw = uniform(mix((keys[:, :1] + position * np.uint64(GOLDEN)) ^ (times * np.uint64(MIX1))))
        score[:, part] = odds[distance] * theta[:, None] * ((1.0 - draw) / draw)
        padding = block > last_block - num_padding
        score[padding, part] = np.inf
    score[~(masked & window)] = -1.0
    committed = score > 1.0
    lone = ~committed.any(axis=1) & (masked & window).any(axis=1)
    best = np.argmax(score, axis=1)
    committed[lone, best[lone]] = True
    return committed


def _pick(keys: npt.NDArray[np.uint64], a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """An entry of a table of 1024, by key."""
    return (mix((keys + a * np.uint64(GOLDEN)) ^ (b * np.uint64(MIX1))) >> np.uint64(54)).astype(np.intp)
