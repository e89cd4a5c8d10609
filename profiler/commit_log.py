"""Commit logs: which masks of its block each sequence computed in a step, and which of them it committed."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CommitLog:
    """One row a sequence and step that computed a mask, each request's in the order of time."""

    block_length: int
    request: Ints
    block_start: Ints  # absolute position of column 0
    masked: Bools  # [rows, block_length] masks before the step
    window: Bools  # [rows, block_length] positions computed
    committed: Bools  # [rows, block_length] masks that were committed


def from_steps(
    block_length: int,
    request: npt.ArrayLike,
    block_start: npt.ArrayLike,
    status: npt.NDArray[np.uint8],
    window: Bools,
    committed: Bools,
) -> CommitLog:
    """The log of rows as plans and outcomes have them: one row a sequence and step, in the order of time."""
    raise NotImplementedError


def from_journal(
    block_length: int,
    input_length: Ints,
    requests: npt.NDArray[np.int32],
    phases: npt.NDArray[np.uint8],
    window: npt.NDArray[np.uint64],
    commits: npt.NDArray[np.uint64],
) -> CommitLog:
    """The log of a journal's list columns, all steps' rows one after another; `input_length` is by request index."""
    raise NotImplementedError
