"""Rows of a block-diffusion model: prefill, denoising steps over a window of the block, and blocks that complete.

A row is a running sequence, a column a position of its current block (and of the next one where a window may reach into
it). Which positions a step computes and when their KV is right are the policy's answers.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from .emission import emit, emit_prefixes, finish, has_masks, publish, set_features
from .hooks import block_entered, choose, holds_back, learn, select, settle
from .jit import rule, whole
from .state import (
    CACHED,
    DENOISE,
    EMIT_END,
    EMIT_STEP,
    FLUSH,
    IDLE,
    MASKED,
    PENDING,
    PREFILL,
    PREFILL_STEP,
    ROWS,
)

HEADS = ("all", "masks")  # computed rows that go through the LM head
MASKS = HEADS.index("masks")


@rule
def plan_prefill(w: Any, x: Any) -> None:
    """Plan the prefill of the chosen rows: each computes its whole prompt, block-causal (1.2)."""
    for i in range(w.c[0].num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        q.num_keys = q.start + w.f[0].block
        q.num_tokens = q.num_keys
        q.left = 0
    plan_pieces(w, int(w.f[0].max_prefill))


@rule
def plan_pieces(w: Any, most: Any) -> None:
    """Plan prompts of which it is noted what the step computes, and what is left: nothing where it takes them whole.

    A prompt's last block is a denoising step (1.2). One of more than `most` tokens is split, and runs alone.
    """
    c, block = w.c[0], int(w.f[0].block)
    tokens = 0
    keys = 0
    qk_pairs = 0
    longest = 0
    rows = 0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        computed, length = int(q.num_tokens), int(q.num_keys)
        before = length - computed
        q.num_retained = computed
        q.phase = PREFILL
        for p in range(w.window.shape[1]):
            w.window[slot, p] = q.left == 0 and p < block
        tokens += computed
        keys += length
        qk_pairs += length * (length + block) - before * (before + block)
        longest = max(longest, computed)
        if q.left == 0:
            rows += block
    set_features(w, tokens, qk_pairs // 2, keys, rows, rows, 0)
    c.prefill_tokens = tokens
    c.num_forwards = max(1, -(-longest // most))


@rule
def visible_keys(status: Any, window: Any, block: Any, listed: Any) -> Any:
    """Positions that a row computes, keys visible beyond its history, and query-key pairs beyond the history.

    listed: a query sees the cached and the computed positions of its own block and of those before it.
    Otherwise it sees every position up to the last computed one (a kernel that knows only a KV length).
    """
    if not listed:
        num = 0
        for p in range(len(window)):
            num += window[p]
        last = len(window)
        while last > 0 and not window[last - 1]:
            last -= 1
        return num, last, num * last
    first_keys = 0
    first_queries = 0
    next_keys = 0
    next_queries = 0
    for p in range(block):
        first_queries += window[p]
        first_keys += window[p] | (status[p] == CACHED)
    for p in range(block, len(status)):
        next_queries += window[p]
        next_keys += window[p] | (status[p] == CACHED)
    num = first_queries + next_queries
    # The next block's cached positions are read only by a query of that block.
    keys = first_keys + next_keys if next_queries > 0 else first_keys
    return num, keys, first_queries * first_keys + next_queries * (first_keys + next_keys)


def visible(status: npt.NDArray[np.uint8], window: npt.NDArray[np.bool_], listed: bool) -> npt.NDArray[np.bool_]:
    """The positions of each row's blocks whose keys `visible_keys` counts, [rows, width], for a device to look up."""
    if listed:
        cached: npt.NDArray[np.bool_] = window | (status == CACHED)
        return cached
    # True from the first column to the last one computed.
    upto: npt.NDArray[np.bool_] = np.logical_or.accumulate(window[:, ::-1], axis=1)[:, ::-1]
    return upto


@rule
def visible_rows(status: Any, window: Any, block: Any, listed: Any) -> Any:
    """`visible_keys` of each row of a plan, three arrays [rows]."""
    rows = len(window)
    num, keys, qk_pairs = np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for i in range(rows):
        num[i], keys[i], qk_pairs[i] = visible_keys(status[i], window[i], block, listed)
    return num, keys, qk_pairs


@rule
def count_prefixes(status: Any, window: Any, committed: Any, pending_counts: Any, counts: Any, sums: Any) -> None:
    """Add, for m = 1, 2, ...: the row if it computed at least m positions (counts[m]) and what its first m committed
    (sums[m], at least one where a mask is among them).

    Positions are counted in the window's masks, or with `pending_counts` in the whole window, in order of position.
    """
    width = len(window)
    rank = 0
    commits = 0
    if not pending_counts:
        for p in range(width):
            if window[p] and status[p] == MASKED:
                rank += 1
                commits += committed[p]
                counts[rank] += 1
                sums[rank] += max(commits, 1)
        return
    any_mask = False
    for p in range(width):
        if window[p] and status[p] == MASKED:
            any_mask = True
            break
    if not any_mask:
        return
    seen_mask = False
    for p in range(width):
        if not window[p]:
            continue
        seen_mask = seen_mask or status[p] == MASKED
        rank += 1
        commits += committed[p]
        counts[rank] += 1
        sums[rank] += max(commits, 1) if seen_mask else commits


_whole = whole("choose")


@rule
def plan_block(w: Any, x: Any) -> None:
    """Plan a decode step of the chosen rows."""
    c, f, p = w.c[0], w.f[0], x.p[0]
    block, width = int(f.block), int(f.width)
    c.chunk = _whole(choose(w, x))
    tokens = 0
    masks = 0
    qk_pairs = 0
    keys = 0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        status, window = w.status[slot], w.window[slot]
        reach = width
        if width > block and q.start + block >= q.end:
            reach = block
        if not p.given:
            window[:] = False
        select(status, reach, c.chunk, p, window)
        num, beyond, own_pairs = visible_keys(status, window, block, p.listed)
        in_window = 0
        for k in range(width):
            in_window += window[k] and status[k] == MASKED
        q.phase = DENOISE if in_window > 0 else FLUSH
        if q.finished or q.lost:  # computed because the batch is frozen, its outcome ignored
            q.phase = IDLE
            window[:] = False
            in_window = 0
        masks += in_window
        start = int(q.start)
        q.num_tokens = num
        q.num_retained = num
        q.num_keys = start + beyond
        tokens += num
        qk_pairs += num * start + own_pairs
        keys += start + beyond
    heads = masks if p.head == MASKS else tokens
    sampled = c.num_rows * block if p.sample_block else heads
    set_features(w, tokens, qk_pairs, keys, heads, sampled, c.chunk)


@rule
def commit_block(w: Any, x: Any, now: Any) -> None:
    """Bring the rows of the step in flight up to date: settle, hand out complete blocks, move on to the next."""
    c, f, own = w.c[0], w.f[0], x.p[0]
    block, width = int(f.block), int(f.width)
    prefill = c.kind == PREFILL_STEP
    learn(w, x, prefill)
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        settle(w.status[slot], w.evaluations[slot], w.window[slot], int(w.q[slot].block), own, prefill)
        for p in range(width):
            w.status[slot, p] = PENDING if w.committed[slot, p] else w.status[slot, p]
        if own.final and w.q[slot].phase == DENOISE and not _any(w.status[slot], block, MASKED):
            for p in range(block):
                w.status[slot, p] = CACHED
    if not prefill and holds_back(w, x):
        return
    if f.emit == EMIT_STEP and not own.late:
        emit_prefixes(w, now)
    if c.prefill_tokens > 0:  # a request for no tokens is over once its prompt is in
        for i in range(c.num_rows):
            slot = w.lists[ROWS, i]
            q = w.q[slot]
            if q.phase == PREFILL and q.left == 0 and q.stop == q.prompt:
                finish(w, slot, now)
    while _advance(w, x, now) and width > block:
        pass  # streaming has already worked on the next block: it may be complete too


@rule
def _advance(w: Any, x: Any, now: Any) -> bool:
    """Hand out blocks that are complete, and open the next where all KV of one is right; whether any moved on."""
    c, f = w.c[0], w.f[0]
    block, width = int(f.block), int(f.width)
    gaps = 0.0
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        q = w.q[slot]
        # Of a prompt whose later chunks are to come, the last block is not reached.
        if not q.unpublished or q.finished or q.left > 0 or has_masks(w, slot, q.block):
            continue
        if x.p[0].late and _any_open(w.status[slot], q.block):
            continue
        gaps += publish(w, slot, now)
        if q.start + q.block >= q.stop:
            finish(w, slot, now)
    c.gap_sum += gaps
    if width > block:
        gaps = 0.0
        for i in range(c.num_rows):
            slot = w.lists[ROWS, i]
            q = w.q[slot]
            if q.unpublished or q.finished or q.start + 2 * block < q.stop or has_masks(w, slot, width):
                continue
            # Streaming has decoded the next, last block to its end: the request needs no flush.
            if f.emit != EMIT_END and q.answer - q.prompt - q.emitted > 0:
                gaps += emit(w, slot, int(q.answer) - q.prompt - q.emitted, now)
            finish(w, slot, now)
        c.gap_sum += gaps
    moved = False
    for i in range(c.num_rows):
        slot = w.lists[ROWS, i]
        if not w.q[slot].finished and not _any_open(w.status[slot], w.q[slot].block):
            moved = True
            next_block(w, x, slot)
    return moved


@rule
def next_block(w: Any, x: Any, slot: Any) -> None:
    """Close a sequence's block and open the next."""
    q, block, width = w.q[slot], int(w.f[0].block), int(w.f[0].width)
    q.start += q.block
    for p in range(width - block):
        w.status[slot, p] = w.status[slot, p + block]
        w.evaluations[slot, p] = w.evaluations[slot, p + block]
    for p in range(width - block, width):
        w.status[slot, p] = MASKED
        w.evaluations[slot, p] = 0
    q.unpublished = True
    block_entered(w, x, slot)


@rule
def _any(status: Any, upto: Any, kind: Any) -> bool:
    for p in range(upto):
        if status[p] == kind:
            return True
    return False


@rule
def _any_open(status: Any, upto: Any) -> bool:
    for p in range(upto):
        if status[p] != CACHED:
            return True
    return False
