"""Padding in a commit log of requests that ran to a fixed length.

After an EOS each block commits whole in one step; an ordinary block does so only sometimes. A request's last such
blocks are its padding, if more requests end so than chance explains.
"""

from dataclasses import dataclass

import numpy as np

from .commit_log import CommitLog
from .samples import Bools, Floats, Ints
from .yields import block_of

SURE = 4.0  # standard errors of that excess


@dataclass(frozen=True, eq=False)
class Padding:
    """A complete log's padding, an entry per request in order of number."""

    request: Ints
    blocks: Ints  # in the log, without prompt blocks
    padding: Ints  # at the end; an ordinary block may be among them
    by_luck: float  # share of earlier blocks that commit whole in one step
    rows: Bools  # [rows of the log] whether a row is padding

    @property
    def share(self) -> float:
        """Share of padding blocks, corrected for ordinary blocks in it by chance."""
        return float((self._expected).sum() / max(1, self.blocks.sum()))

    @property
    def error(self) -> float:
        """The share's standard error, from the scatter between requests."""
        off = self._expected - self.share * self.blocks
        return float(np.sqrt((off**2).sum() / max(1, len(off) - 1) * len(off)) / max(1, self.blocks.sum()))

    @property
    def _expected(self) -> Floats:
        more = self.by_luck / (1.0 - self.by_luck) if self.by_luck < 1.0 else 0.0
        expected: Floats = np.maximum(0.0, self.padding - more * (self.padding > 0))
        return expected


def padding_of(log: CommitLog) -> Padding | None:
    """A complete log's padding (yields.complete); None if chance explains all last blocks."""
    if not len(log):
        return None
    block = block_of(log)
    first = np.flatnonzero(np.diff(block, prepend=-1))
    open_ = np.asarray(log.masked[first].all(axis=1), np.bool_)  # excludes the prompt's own block
    whole = np.asarray(open_ & log.committed[first].all(axis=1), np.bool_)
    request, which = np.unique(log.request[first], return_inverse=True)
    num = np.bincount(which, open_).astype(np.int64)
    # Counted from the end, up to the first that took more than one step.
    trailing = np.zeros(len(first), np.bool_)
    for i in range(len(first) - 1, -1, -1):
        is_last = i + 1 == len(first) or which[i + 1] != which[i]
        trailing[i] = whole[i] and (is_last or trailing[i + 1])
    run = np.bincount(which, trailing).astype(np.int64)
    before = open_ & ~trailing
    # The last block before the padding never commits whole; it would be padding.
    num_ordinary = int(before.sum()) - int(np.count_nonzero(num > run))
    by_luck = (int((whole & before).sum()) + 0.5) / (max(0, num_ordinary) + 1.0)
    ends, num_open = int(np.count_nonzero(run)), int(np.count_nonzero(num))
    chance = by_luck * num_open
    if ends - chance < SURE * np.sqrt(max(chance * (1.0 - by_luck), 1.0)):
        return None
    return Padding(request, num, run, by_luck, np.asarray(trailing[block], np.bool_))
