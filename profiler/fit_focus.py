"""Fit how FOCUS's importance deltas separate decodable from undecodable masks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..engine.commits import ImportanceDeltas
from .profile import digits
from .samples import Bools, Floats, Ints

FEWEST = 200  # masks for a fit


@dataclass(frozen=True, eq=False)
class Deltas:
    """Masks of steps over whole blocks, an entry a mask."""

    delta: Floats  # in standard deviations from the mean of its sequence's masks
    distance: Ints  # positions from the sequence's first mask
    decodable: Bools  # its confidence reaches the threshold or is its sequence's highest


def deltas(
    row: Ints, column: Ints, delta: npt.NDArray[np.floating], confidence: npt.NDArray[np.floating], threshold: float
) -> Deltas:
    """The masks of one step [masks], ordered by row and column.

    Rows with fewer than three masks, whose standardised importances never vary, are left out.
    """
    _, first, sequence, num = np.unique(row, return_index=True, return_inverse=True, return_counts=True)
    wide = delta.astype(np.float64)
    off = wide - (np.bincount(sequence, wide) / num)[sequence]
    std = np.sqrt(np.bincount(sequence, off**2) / num)[sequence]
    best = np.lexsort((column, -confidence, sequence))[np.cumsum(num) - num]  # ties go to the left, as in unmasking
    decodable = confidence >= confidence.dtype.type(threshold)
    decodable[best] = True
    varied = (num[sequence] > 2) & (std > 0)
    return Deltas(
        off[varied] / std[varied], (column - column[first][sequence])[varied].astype(np.int64), decodable[varied]
    )


def fit_focus(logs: Sequence[Deltas]) -> ImportanceDeltas | None:
    """delta = class mean - slope x distance by least squares, and each class's scatter; None: too few masks."""
    if not logs:
        return None
    delta, distance, decodable = (
        np.concatenate([getattr(log, name) for log in logs]) for name in ("delta", "distance", "decodable")
    )
    if len(delta) < FEWEST or decodable.all():
        return None
    design = np.stack([decodable, ~decodable, -distance], axis=1).astype(np.float64)
    (able, unable, slope), *_ = np.linalg.lstsq(design, delta, rcond=None)
    off = delta - design @ np.array([able, unable, slope])
    return ImportanceDeltas(
        digits(able, 4), digits(off[decodable].std(), 4), digits(unable, 4), digits(off[~decodable].std(), 4),
        digits(slope, 4),
    )  # fmt: skip
