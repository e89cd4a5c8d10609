"""Padding in a commit log of requests that ran to a fixed length.

After an EOS each block commits whole in one step; an ordinary block does so only sometimes. The run of such blocks at a
request's end is its padding, if more requests end in such a block than chance explains.
"""

from dataclasses import dataclass

import numpy as np

from .commit_log import CommitLog
from .samples import Bools, Floats, Ints
from .yields import block_of

SURE = 4.0  # standard errors of that excess


@dataclass(frozen=True, eq=False)
class Padding:
    """The padding of a complete log, one entry per request in the order of request numbers."""

    request: Ints
    blocks: Ints  # in the log, without prompt blocks
    padding: Ints  # padding blocks at the end; may include an ordinary block before them
    by_luck: float  # share of the blocks before the padding that commit whole in one step
    rows: Bools  # [rows of the log] whether a row is padding

    @property
    def share(self) -> float:
        """The share of blocks that are padding, corrected for ordinary blocks that end up in it by chance."""
        return float((self._expected).sum() / max(1, self.blocks.sum()))

    @property
    def error(self) -> float:
        """The standard error of the share, from the scatter between requests."""
        off = self._expected - self.share * self.blocks
        return float(np.sqrt((off**2).sum() / max(1, len(off) - 1) * len(off)) / max(1, self.blocks.sum()))

    @property
    def _expected(self) -> Floats:
        more = self.by_luck / (1.0 - self.by_luck) if self.by_luck < 1.0 else 0.0
        found: Floats = np.maximum(0.0, self.padding - more * (self.padding > 0))
        return found


def padding_of(log: CommitLog) -> Padding | None:
    """The padding of a complete log (yields.complete); None if chance explains the last blocks of all requests."""
    if not len(log):
        return None
    block = block_of(log)
    first = np.flatnonzero(np.diff(block, prepend=-1))
    open_ = np.asarray(log.masked[first].all(axis=1), np.bool_)  # excludes the prompt's own block
    whole = np.asarray(open_ & log.committed[first].all(axis=1), np.bool_)
    request, which = np.unique(log.request[first], return_inverse=True)
    num = np.bincount(which, open_).astype(np.int64)
    # A request's blocks counted from its end, up to the first that took more than one step.
    trailing = np.zeros(len(first), np.bool_)
    for i in range(len(first) - 1, -1, -1):
        is_last = i + 1 == len(first) or which[i + 1] != which[i]
        trailing[i] = whole[i] and (is_last or trailing[i + 1])
    run = np.bincount(which, trailing).astype(np.int64)
    before = open_ & ~trailing
    # The last block before the padding never commits whole; otherwise it would be padding.
    known = int(before.sum()) - int(np.count_nonzero(num > run))
    by_luck = (int((whole & before).sum()) + 0.5) / (max(0, known) + 1.0)
    ends, seen = int(np.count_nonzero(run)), int(np.count_nonzero(num))
    chance = by_luck * seen
    if ends - chance < SURE * np.sqrt(max(chance * (1.0 - by_luck), 1.0)):
        return None
    return Padding(request, num, run, by_luck, np.asarray(trailing[block], np.bool_))
