"""Unmasking of your own: the masks that reach the threshold before the first that does not: text grows in order."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.policy import EVERY_STEP, Policy, Preset, Unmasking

Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LeftToRight(Unmasking):
    """Commits from the left, and always the leftmost mask."""

    def unmask(self, surety: npt.NDArray[np.floating[Any]], sure: Marks, masked: Marks) -> Marks:
        first = masked & (masked.cumsum(axis=1) == 1)
        unbroken: Marks = np.logical_and.accumulate(sure | first | ~masked, axis=1) & masked
        return unbroken


POLICY = Preset(Policy("left-to-right", EVERY_STEP, unmasking=LeftToRight()), main="threshold")
