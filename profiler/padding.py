"""Padding in a commit log of requests that ran to a fixed length.

After an EOS each block commits whole in one step; an ordinary block does so only sometimes. A request's last such
blocks are its padding, if more requests end so than chance explains.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from .commit_log import CommitLog
from .samples import Bools, Floats, Ints
from .yields import block_of

SURE = 4.0  # standard errors of that excess


@dataclass(frozen=True, eq=False)
class Padding:
    """A complete log's padding, an entry per request in order of number."""

    blocks: Ints  # in the log, without prompt blocks
    padding: Ints  # at the end; an ordinary block may be among them
    by_luck: float  # share of earlier blocks that commit whole in one step
    rows: Bools  # [rows of the log] whether a row is padding

    @property
    def expected(self) -> Floats:
        """Padding blocks of each request, corrected for ordinary blocks among them by chance."""
        odds = self.by_luck / (1.0 - self.by_luck) if self.by_luck < 1.0 else 0.0
        return np.maximum(0.0, self.padding - odds * (self.padding > 0))

    @property
    def share(self) -> float:
        """Share of padding blocks."""
        return float(self.expected.sum() / max(1, self.blocks.sum()))

    @property
    def error(self) -> float:
        """The share's standard error, from the scatter between requests."""
        off = self.expected - self.share * self.blocks
        return float(np.sqrt((off**2).sum() / max(1, len(off) - 1) * len(off)) / max(1, self.blocks.sum()))


def padding_of(log: CommitLog) -> Padding | None:
    """A complete log's padding (yields.complete); None if chance explains all last blocks."""
    if not len(log):
        return None
    block = block_of(log)
    first = np.flatnonzero(np.diff(block, prepend=-1))
    open_ = log.masked[first].all(axis=1)  # excludes the prompt's own block
    at_once = np.asarray(log.committed[first].all(axis=1))
    _, which = np.unique(log.request[first], return_inverse=True)
    # Counted from the end, up to the first that took more than one step.
    trailing = pd.Series(at_once[::-1]).groupby(which[::-1]).cummin().to_numpy(np.bool_)[::-1]
    num, run = (np.bincount(which, values).astype(np.int64) for values in (open_, trailing))
    before = open_ & ~trailing
    # The last block before the padding never commits whole; it would be padding.
    num_ordinary = before.sum() - (num > run).sum()
    by_luck = float(((at_once & before).sum() + 0.5) / (max(0, num_ordinary) + 1.0))
    chance = by_luck * np.count_nonzero(num)
    if np.count_nonzero(run) - chance < SURE * np.sqrt(max(chance * (1.0 - by_luck), 1.0)):
        return None
    return Padding(num, run, by_luck, trailing[block])
