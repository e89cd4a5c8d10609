"""Batches of rows as a forward takes them, their pages in shuffled order."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsim.live.forward import Batch


def batch_of(
    chance: np.random.Generator, history: Any, positions: Sequence[Any], block: int, *, page: int = 8, vocab: int = 96,
    **more: Any,
) -> Batch:  # fmt: skip
    """Sequences that compute these positions, of which those behind the history are listed in its block."""
    num, lengths, every = len(positions), [len(each) for each in positions], np.concatenate(positions)
    pages = int(every.max()) // page + 1
    table = chance.permutation(num * pages).reshape(num, pages).astype(np.int32)
    rows = np.repeat(np.arange(num), lengths)
    places = table[rows, every // page].astype(np.int64) * page + every % page
    columns = every - np.array(history)[rows]
    listed = np.zeros((num, block if (columns >= 0).any() else 1), np.bool_)
    listed[rows[columns >= 0], columns[columns >= 0]] = True
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = chance.integers(0, vocab, len(rows))
    sampled = more.pop("sampled", np.arange(len(rows)))
    return Batch(tokens, every, places, starts, table, np.array(history), listed, block, sampled, **more)
