"""Batches padded to few shapes: one captured graph serves many steps."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ..engine.latency import bucket
from ..engine.spec import Policy
from .evicting import Evict, Retained
from .forward import Batch

MAX_ROWS = 8192  # of a captured step

# Larger prefills hide their launches.
MOST_PREFILL_ROWS = 1024
LEAST_PREFILL_ROWS = 32
PREFILL_SEQUENCES = (1, 16, 64)  # filled up to

Shape = tuple[int, int]  # rows, and sequences with the spare one of padding rows


def padded_shape(rows: int, sequences: int) -> Shape:
    """The shape that a step is padded to."""
    return bucket(rows), bucket(sequences) + 1


def prefill_shape(rows: int, sequences: int) -> Shape | None:
    """The shape that a prefill is padded to; None: it runs eagerly."""
    padded = max(LEAST_PREFILL_ROWS, bucket(rows))
    if padded > MOST_PREFILL_ROWS or sequences > PREFILL_SEQUENCES[-1]:
        return None
    return padded, 1 + next(size for size in PREFILL_SEQUENCES if size >= sequences)


def reachable_prefills(policy: Policy, max_batch: int, longest: int) -> list[Shape]:
    """Padded shapes of prefills of at most `max_batch` sequences of `longest` tokens, largest first."""
    limit = min(MOST_PREFILL_ROWS, policy.batching.max_prefill_tokens)
    shapes = {
        prefill_shape(rows, n)
        for n in range(1, min(max_batch, PREFILL_SEQUENCES[-1]) + 1)
        for rows in {bucket(rows) for rows in range(n, min(limit, n * longest) + 1)}
    }
    return sorted((shape for shape in shapes if shape is not None), reverse=True)


def reachable(policy: Policy, max_batch: int) -> list[Shape]:
    """Padded shapes of decode steps of at most `max_batch` sequences and MAX_ROWS rows, largest first."""
    low, high = 1, policy.width
    if policy.granularity.static:
        low = high
    if (policy.granularity.whole_block or policy.rows.commits == "tokens") and not policy.eviction.evicts:
        low = high = policy.block_length
    shapes = {
        padded_shape(rows, n)
        for n in range(1, max_batch + 1)
        for rows in {bucket(rows) for rows in range(n * low, min(n * high, MAX_ROWS) + 1)}
    }
    return sorted(shapes, reverse=True)


def reachable_after(shapes: Iterable[Shape]) -> list[Shape]:
    """Padded shapes after an eviction, largest first: fewer rows of the same sequences."""
    smaller = {(bucket(num), sequences) for rows, sequences in shapes for num in range(1, rows + 1)}
    return sorted(smaller, reverse=True)


def blank(rows: int, sequences: int, pages: int, width: int, block_length: int) -> Batch:
    """A decode batch that writes and sees nothing."""
    zeros = np.zeros(rows, np.int64)
    return Batch(
        tokens=zeros,
        positions=zeros,
        places=zeros - 1,
        query_start=np.arange(sequences + 1) * rows // sequences,
        page_table=np.full((sequences, pages), -1, np.int32),
        history=np.zeros(sequences, np.int64),
        listed=np.zeros((sequences, width), np.bool_),
        block_length=block_length,
        sampled=np.arange(rows),
        spare=1,
    )


def pad(batch: Batch, rows: int, sequences: int, pages: int) -> Batch:
    """Pad with rows that write and see nothing, all in the first padding sequence; pages: the table's columns.

    A last sequence is spare, so that a full bucket of sequences has room for padding rows: filling the next bucket
    would halve the rows a sequence by which attention chooses its tile.
    """
    num_rows, num_sequences = len(batch.tokens), len(batch.history)
    extra, after = rows - num_rows, sequences - num_sequences
    assert extra >= 0, f"{num_rows} rows in {rows}"
    assert after > 0, f"{num_sequences} sequences and a spare one in {sequences}"
    columns = pages - batch.page_table.shape[1]
    evict = batch.evict
    return Batch(
        tokens=np.pad(batch.tokens, (0, extra)),
        positions=np.pad(batch.positions, (0, extra)),
        places=np.pad(batch.places, (0, extra), constant_values=-1),
        query_start=np.pad(batch.query_start, (0, after), constant_values=rows),
        page_table=np.pad(batch.page_table, ((0, after), (0, columns)), constant_values=-1),
        history=np.pad(batch.history, (0, after)),
        listed=np.pad(batch.listed, ((0, after), (0, 0))),
        block_length=batch.block_length,
        sampled=batch.sampled,
        evict=evict and _padded(evict, rows, after),
        spare=1,
    )


def _padded(evict: Evict, rows: int, after: int) -> Evict:
    """Padding rows are no masks; after: padding sequences."""
    return replace(
        evict,
        # An entry a row; `masked_start` marks the real ones.
        masked=np.pad(evict.masked, (0, rows - len(evict.masked))),
        masked_start=np.pad(evict.masked_start, (0, after), mode="edge"),
    )


def pad_retained(retained: Retained, rows: int, sequences: int) -> Retained:
    """Pad retained rows with rows that write nothing and are of no sequence."""
    extra, after = rows - len(retained.rows), sequences - len(retained.listed)
    return Retained(
        rows=np.pad(retained.rows, (0, extra)),
        positions=np.pad(retained.positions, (0, extra)),
        places=np.pad(retained.places, (0, extra), constant_values=-1),
        query_start=np.pad(retained.query_start, (0, after), mode="edge"),
        listed=np.pad(retained.listed, ((0, after), (0, 0))),
    )
