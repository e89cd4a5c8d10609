"""Commit logs: the masks of a block that each sequence computed in a step, and those it committed."""

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from ..engine.errors import ProfileError
from ..engine.journal import unpack
from .samples import Bools, Ints


@dataclass(frozen=True, eq=False)
class CommitLog:
    """A row for each sequence and step that computed a mask, in order of time."""

    block_length: int
    request: Ints
    block_start: Ints  # absolute position of column 0
    masked: Bools  # [rows, block_length] masks before the step
    window: Bools  # [rows, block_length] masks computed
    committed: Bools  # [rows, block_length] masks committed

    def __len__(self) -> int:
        return len(self.request)

    def __getitem__(self, keep: "Bools | Ints") -> "CommitLog":
        return replace(self, **{f.name: getattr(self, f.name)[keep] for f in fields(self)[1:]})

    def sorted(self) -> "CommitLog":
        """The log by request and block, in order of time."""
        return self[np.lexsort((np.arange(len(self)), self.block_start, self.request))]


def from_journal(
    block_length: int,
    input_length: Ints,
    requests: npt.NDArray[np.int32],
    window: npt.NDArray[np.uint64],
    commits: npt.NDArray[np.uint64],
) -> CommitLog:
    """The log of a journal's list columns, all steps' rows in order; input_length by request.

    A step that computes a mask commits at least one: rows without commits are passes over committed positions.
    """
    rows = len(requests)
    if rows and window.reshape(rows, -1).shape[1] != max(1, -(-block_length // 64)):
        raise ProfileError("the journal's windows reach beyond the block: log a policy whose window stays in its block")
    computed = unpack(window.reshape(rows, -1), block_length)
    committed = unpack(commits.reshape(rows, -1), block_length)
    masked = np.zeros((rows, block_length), np.bool_)
    start = np.zeros(rows, np.int64)
    blocks: dict[int, tuple[int, Bools]] = {}  # by request: the current block's first position and masks
    for row in np.flatnonzero(committed.any(axis=1)):
        request = int(requests[row])
        if request not in blocks:
            # The prompt ends inside this block (block-diffusion.md 1.2).
            first = (max(1, int(input_length[request])) - 1) // block_length * block_length
            blocks[request] = first, np.arange(block_length) >= input_length[request] - first
        first, masks = blocks[request]
        if not masks.any():
            first, masks = first + block_length, np.ones(block_length, np.bool_)
        start[row], masked[row] = first, masks
        blocks[request] = first, masks & ~committed[row]
    log = CommitLog(
        block_length=block_length,
        request=np.asarray(requests, np.int64),
        block_start=start,
        masked=masked,
        window=computed & masked,
        committed=committed,
    )
    wrong = np.flatnonzero((committed & ~log.window).any(axis=1))
    if len(wrong):
        raise ProfileError(f"request {log.request[wrong[0]]} committed what is not a computed mask")
    return log[np.asarray(log.window.any(axis=1), np.bool_)]
