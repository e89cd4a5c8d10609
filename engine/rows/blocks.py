"""Rows of a block-diffusion model: prefill, denoising over a window of the block, completed blocks.

A row is a running sequence, a column a position of its current block or of the next ones (`num_blocks`). The policy
chooses which positions a step computes and when their KV is final.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..emission import emit, emit_prefixes, finish, has_masks, publish
from ..hooks import (
    block_entered,
    choose,
    columns_in_reach,
    commit_rows,
    holds_back,
    learn,
    plan_prompts,
    plan_rows,
    select,
    settle,
)
from ..jit import rule
from ..state import (
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
    AnyPolicy,
    Marks,
    Replica,
    Status,
    step_slots,
)
from .features import add_row, no_rows, note_row, set_features
from .kind import Kind

HEADS = ("all", "masks")  # computed rows that go through the LM head
MASKS = HEADS.index("masks")


@rule
def plan_prefill(replica: Replica, policy: AnyPolicy) -> None:
    """Plan a prefill: each row computes its prompt, block-causal (1.2)."""
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        sequence.num_keys = sequence.start + replica.fixed.block
        sequence.num_tokens = sequence.num_keys
        sequence.left = 0
    plan_pieces(replica, replica.fixed.max_prefill)


@rule
def plan_pieces(replica: Replica, limit: int) -> None:
    """Plan a prefill from rows' num_tokens, num_keys and left (0: the prompt is complete).

    A prompt's last block is a denoising step (1.2). Prompts of more than `limit` tokens take several forwards.
    """
    block, longest, sums = replica.fixed.block, 0, no_rows()
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        computed, length = int(sequence.num_tokens), int(sequence.num_keys)
        before = length - computed
        complete = sequence.left == 0
        for p in range(replica.window.shape[1]):
            replica.window[slot, p] = complete and p < block
        note_row(sequence, PREFILL, computed, length)
        rows = block if complete else 0
        # Block-causal: positions see their own and earlier blocks.
        sums = add_row(sums, sequence, (length * (length + block) - before * (before + block)) // 2, rows, rows)
        longest = max(longest, computed)
    set_features(replica, sums, 0)
    replica.counters.num_forwards = max(1, -(-longest // limit))


@rule
def visible_keys(status: Status, window: Marks, block: int, listed: bool) -> tuple[int, int, int]:
    """A row's computed positions, and its keys and query-key pairs after its history.

    listed: queries see cached and computed positions of their block and earlier ones; else all up to the last computed
    one (kernels that take only a KV length).
    """
    if not listed:
        num = 0
        for p in range(len(window)):
            num += window[p]
        last = len(window)
        while last > 0 and not window[last - 1]:
            last -= 1
        return num, last, num * last
    num = 0
    keys = 0
    qk_pairs = 0
    visible = 0  # up to the block's end
    for begin in range(0, len(status), block):
        states, marks = status[begin : begin + block], window[begin : begin + block]
        queries = 0
        for p in range(block):
            queries += marks[p]
            visible += marks[p] | (states[p] == CACHED)
        num += queries
        qk_pairs += queries * visible
        # Only queries of a block or of later ones read its cached positions.
        if queries > 0 or begin == 0:
            keys = visible
    return num, keys, qk_pairs


def visible(status: npt.NDArray[np.uint8], window: npt.NDArray[np.bool_], listed: bool) -> npt.NDArray[np.bool_]:
    """Positions counted by `visible_keys`, [rows, width], for devices."""
    if listed:
        cached: npt.NDArray[np.bool_] = window | (status == CACHED)
        return cached
    # Up to the last computed column.
    reach: npt.NDArray[np.bool_] = np.logical_or.accumulate(window[:, ::-1], axis=1)[:, ::-1]
    return reach


@rule
def visible_rows(status: Status, window: Marks, block: int, listed: bool) -> Any:
    """`visible_keys` of each row, three arrays [rows]."""
    rows = len(window)
    num, keys, qk_pairs = np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for i in range(rows):
        num[i], keys[i], qk_pairs[i] = visible_keys(status[i], window[i], block, listed)
    return num, keys, qk_pairs


@rule
def count_prefixes(
    status: Status, window: Marks, committed: Marks, counts: npt.NDArray[np.int64], sums: npt.NDArray[np.int64]
) -> None:
    """Add a row: counts[m] += 1 if it computed at least m positions, sums[m] += the commits of its first m.

    Positions are the window's masks from the left; m counts from 1. A part adds at least one commit.
    """
    rank = 0
    commits = 0
    for p in range(len(window)):
        if window[p] and status[p] == MASKED:
            rank += 1
            commits += committed[p]
            counts[rank] += 1
            sums[rank] += max(commits, 1)


@rule
def plan_block(replica: Replica, policy: AnyPolicy) -> None:
    counters, fixed, fields = replica.counters, replica.fixed, policy.fields
    block, width = fixed.block, fixed.width
    counters.chunk = choose(replica, policy)
    sums = no_rows()
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        status, window = replica.status[slot], replica.window[slot]
        reach = columns_in_reach(replica, policy, slot)
        if not fields.given:
            window[:] = False
        select(status, reach, counters.chunk, fields, window)
        num, extent, own_pairs = visible_keys(status, window, block, fields.listed)
        if fields.static:  # other columns are computed, too, and seen by none
            own_pairs += (width - num) * extent
            num = width
        masks = 0
        for k in range(width):
            masks += window[k] and status[k] == MASKED
        phase = DENOISE if masks > 0 else FLUSH
        if sequence.finished or sequence.lost:  # computed only as the batch is frozen
            phase = IDLE
            window[:] = False
            masks = 0
        start = int(sequence.start)
        heads = masks if fields.head == MASKS else num
        note_row(sequence, phase, num, start + extent)
        sums = add_row(sums, sequence, num * start + own_pairs, heads, block if fields.sample_block else heads)
    set_features(replica, sums, counters.chunk)


@rule
def commit_block(replica: Replica, policy: AnyPolicy, now: float) -> None:
    """Update the step's rows: settle, return complete blocks, open next ones."""
    counters, fixed, fields = replica.counters, replica.fixed, policy.fields
    block, width = fixed.block, fixed.width
    prefill = counters.kind == PREFILL_STEP
    learn(replica, policy, prefill)
    for slot in step_slots(replica):
        settle(
            replica.status[slot],
            replica.evaluations[slot],
            replica.window[slot],
            int(replica.sequences[slot].block),
            fields,
            prefill,
        )
        for p in range(width):
            replica.status[slot, p] = PENDING if replica.committed[slot, p] else replica.status[slot, p]
        sequence = replica.sequences[slot]
        if fields.final and sequence.phase == DENOISE and not _any(replica.status[slot], int(sequence.block), MASKED):
            for p in range(block):
                replica.status[slot, p] = CACHED
    if not prefill and holds_back(replica, policy):
        return
    if fixed.emit == EMIT_STEP and not fields.late:
        emit_prefixes(replica, width if fields.ordered else block, now)
    if counters.prefill_tokens > 0:  # requests for no tokens end with their prefill
        for slot in step_slots(replica):
            sequence = replica.sequences[slot]
            if sequence.phase == PREFILL and sequence.left == 0 and sequence.stop == sequence.prompt:
                finish(replica, slot, now)
    moved = True
    while moved:  # streaming may have completed the next block too
        moved = _advance(replica, policy, now) and width > block


@rule
def _advance(replica: Replica, policy: AnyPolicy, now: float) -> bool:
    """Return complete blocks; open the next block of rows with final KV. True if any row moved on."""
    counters, fixed, fields = replica.counters, replica.fixed, policy.fields
    block, width = fixed.block, fixed.width
    gaps = 0.0
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        # A prompt with chunks left is not at its last block.
        if (
            not sequence.unpublished
            or sequence.finished
            or sequence.left > 0
            or has_masks(replica, slot, sequence.block)
        ):
            continue
        if fields.late and _any_open(replica.status[slot], sequence.block):
            continue
        complete = int(sequence.block)
        if fields.ordered:
            complete = _complete(replica.status[slot], block)
        gaps += publish(replica, slot, complete, now)
        if sequence.start + complete >= sequence.stop and not (fields.ordered and _denoises(replica, slot)):
            finish(replica, slot, now)
    counters.gap_sum += gaps
    if width > block and not fields.ordered:
        gaps = 0.0
        for slot in step_slots(replica):
            sequence = replica.sequences[slot]
            if (
                sequence.unpublished
                or sequence.finished
                or sequence.start + 2 * block < sequence.stop
                or has_masks(replica, slot, width)
            ):
                continue
            # Streaming has decoded the last block, too: no flush.
            if fixed.emit != EMIT_END and sequence.answer - sequence.prompt - sequence.emitted > 0:
                gaps += emit(replica, slot, int(sequence.answer) - sequence.prompt - sequence.emitted, now)
            finish(replica, slot, now)
        counters.gap_sum += gaps
    moved = False
    for slot in step_slots(replica):
        if not replica.sequences[slot].finished and not _any_open(replica.status[slot], replica.sequences[slot].block):
            moved = True
            next_block(replica, policy, slot)
    return moved


@rule
def next_block(replica: Replica, policy: AnyPolicy, slot: int) -> None:
    sequence, block, width = replica.sequences[slot], replica.fixed.block, replica.fixed.width
    sequence.start += sequence.block
    for p in range(width - block):
        replica.status[slot, p] = replica.status[slot, p + block]
        replica.evaluations[slot, p] = replica.evaluations[slot, p + block]
    for p in range(width - block, width):
        replica.status[slot, p] = MASKED
        replica.evaluations[slot, p] = 0
    sequence.unpublished = True
    block_entered(replica, policy, slot)


@rule
def _complete(status: Status, block: int) -> int:
    """Columns of the first blocks without masks."""
    num = 0
    while num < len(status) and status[num] != MASKED:
        num += 1
    return num // block * block


@rule
def _denoises(replica: Replica, slot: int) -> bool:
    """Whether an opened block, which a step has computed, has masks."""
    for p in range(replica.fixed.width):
        if replica.status[slot, p] == MASKED and replica.evaluations[slot, p] > 0:
            return True
    return False


@rule
def _any(status: Status, limit: int, kind: int) -> bool:
    for p in range(limit):
        if status[p] == kind:
            return True
    return False


@rule
def _any_open(status: Status, limit: int) -> bool:
    for p in range(limit):
        if status[p] != CACHED:
            return True
    return False


BLOCKS = Kind(
    "blocks",
    {plan_prompts: plan_prefill, plan_rows: plan_block, commit_rows: commit_block},
    asks=(choose, columns_in_reach, select, learn, settle, holds_back, block_entered),
)
