"""Decode batches padded to few shapes, so that a captured graph of one shape serves many steps."""

import numpy as np

from ..engine.latency import bucket
from .forward import Batch


def shape_of(batch: Batch) -> tuple[int, int]:
    """Rows and sequences that a decode batch is padded to. Padding rows need a sequence of their own."""
    rows, sequences = len(batch.tokens), len(batch.history)
    padded = bucket(rows)
    return padded, bucket(sequences + (padded > rows))


def pad(batch: Batch, rows: int, sequences: int, pages: int, width: int) -> Batch:
    """The batch with rows that write nothing, see nothing and are read by no one; `pages` and `width` count columns.

    The first padding sequence has all padding rows, the others none.
    """
    num_rows, num_sequences = len(batch.tokens), len(batch.history)
    more, after = rows - num_rows, sequences - num_sequences
    assert more >= 0, f"{num_rows} rows in {rows}"
    assert after >= (more > 0), f"{num_sequences} sequences and {more} padding rows in {sequences}"
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
    )
