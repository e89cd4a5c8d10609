"""FOCUS's choice of the masked tokens that a step goes on computing after its second layer (focus.md 3.4)."""

import math

import numpy as np
import numpy.typing as npt


def budget(num_masked: int, num_decoded: int, num_steps: int, alpha: float) -> int:
    """How many masked tokens of a sequence are to be kept at least; nothing is evicted unless more are masked.

    num_decoded tokens were decoded in this block so far, in num_steps steps that decoded any. The result is between 1
    and num_masked, so that whatever is evicted, something is retained.
    """
    mean = num_decoded / num_steps if num_steps else 1.0
    return min(num_masked, max(1, math.ceil(max(mean, 1.0) * alpha)))


def retained(
    delta: npt.NDArray[np.float32], positions: npt.NDArray[np.integer], budget: int, progress: int
) -> npt.NDArray[np.bool_]:
    """Which masked tokens of one sequence are kept.

    delta: importance in the second layer less that in the first. positions: in the block, ascending. progress: the
    rightmost position retained before in this block, or -1. Kept are the tokens a standard deviation above the mean, or
    if these are fewer the budget's most important ones, the lower index on ties; the left neighbour of each; and every
    token left of the rightmost that is right of the progress, whose keys were never computed. Sums are in double
    precision from left to right, so that every implementation has the same bits.
    """
    num_masked = len(delta)
    if num_masked <= budget:
        return np.ones(num_masked, dtype=np.bool_)
    wide = delta.astype(np.float64)
    mean = np.cumsum(wide)[-1] / num_masked
    std = np.sqrt(np.cumsum(np.square(wide - mean))[-1] / num_masked)
    selected: npt.NDArray[np.bool_] = wide >= mean + std
    if np.count_nonzero(selected) < budget:
        selected[:] = False
        selected[np.argsort(-delta, kind="stable")[:budget]] = True
    keep = selected.copy()
    keep[:-1] |= selected[1:] & (np.diff(positions) == 1)
    keep |= (positions < positions[keep].max()) & (positions > progress)
    return keep
