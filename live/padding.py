"""Decode batches padded to few shapes: one captured graph serves many steps."""

import numpy as np

from ..engine.latency import bucket
from ..engine.policy import Policy
from .forward import Batch

MAX_ROWS = 8192  # of a captured step

Shape = tuple[int, int]  # rows, and sequences with the spare one of padding rows


def padded_shape(rows: int, sequences: int) -> Shape:
    """The shape that a step is padded to."""
    return bucket(rows), bucket(sequences) + 1


def computes_whole_blocks(policy: Policy) -> bool:
    """Whether decode steps compute whole blocks, or tokens, that see all their keys."""
    return (policy.granularity.whole_block or policy.rows.commits == "tokens") and not policy.eviction.evicts


def reachable(policy: Policy, max_batch: int) -> list[Shape]:
    """Padded shapes of decode steps of at most `max_batch` sequences and MAX_ROWS rows, largest first."""
    least, most = (policy.block_length,) * 2 if computes_whole_blocks(policy) else (1, policy.width)
    found = {
        padded_shape(rows, n)
        for n in range(1, max_batch + 1)
        for rows in {bucket(rows) for rows in range(n * least, min(n * most, MAX_ROWS) + 1)}
    }
    return sorted(found, reverse=True)


def pad(batch: Batch, rows: int, sequences: int, pages: int, width: int) -> Batch:
    """Pad with rows that write and see nothing, all in the first padding sequence; pages, width: tables' columns.

    A last sequence is spare, so that a full bucket of sequences has room for padding rows: filling the next bucket
    would halve the rows a sequence by which attention chooses its tile.
    """
    num_rows, num_sequences = len(batch.tokens), len(batch.history)
    more, after = rows - num_rows, sequences - num_sequences
    assert more >= 0, f"{num_rows} rows in {rows}"
    assert after > 0, f"{num_sequences} sequences and a spare one in {sequences}"
    table = np.full((sequences, pages), -1, np.int32)
    table[:num_sequences, : batch.page_table.shape[1]] = batch.page_table
    listed = np.zeros((sequences, width), np.bool_)
    listed[:num_sequences, : batch.listed.shape[1]] = batch.listed
    return Batch(
        tokens=np.pad(batch.tokens, (0, more)),
        positions=np.pad(batch.positions, (0, more)),
        places=np.pad(batch.places, (0, more), constant_values=-1),
        query_start=np.pad(batch.query_start, (0, after), constant_values=rows),
        page_table=table,
        history=np.pad(batch.history, (0, after)),
        listed=listed,
        block_length=batch.block_length,
        sampled=np.arange(rows),
        spare=1,
    )
