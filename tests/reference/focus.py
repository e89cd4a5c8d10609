"""Oracle of FOCUS: budgets, importance deltas, and the masked tokens that go beyond the second layer (focus.md 3.4)."""

import numpy as np
import numpy.typing as npt

from dsim.engine.chance import key
from dsim.engine.draw import NORMAL, OF_IMPORTANCE, Draws
from dsim.engine.state import MASKED

Counts = int | npt.NDArray[np.integer]


def budget(num_masked: Counts, num_decoded: Counts, num_steps: Counts, alpha: float) -> npt.NDArray[np.int64]:
    """How many masked tokens of each sequence are to be kept at least; nothing is evicted unless more are masked.

    num_decoded tokens were decoded so far, in num_steps steps that decoded any. The result is between 1 and
    num_masked, so that whatever is evicted, something is retained.
    """
    mean = np.where(np.equal(num_steps, 0), 1.0, np.divide(num_decoded, np.maximum(num_steps, 1)))
    wanted = np.maximum(1, np.ceil(np.maximum(mean, 1.0) * alpha)).astype(np.int64)
    return np.minimum(num_masked, wanted)


def draw_deltas(
    status: npt.NDArray[np.uint8],
    window: npt.NDArray[np.bool_],
    decodable: npt.NDArray[np.bool_],
    requests: npt.NDArray[np.int64],
    block_start: npt.NDArray[np.int64],
    evaluations: npt.NDArray[np.uint16],
    d: Draws,
) -> npt.NDArray[np.float32]:
    """Importance deltas, [rows, width], drawn by whether a mask is decodable.

    Where no mask is computed the result means nothing.
    """
    masked = window & (status == MASKED)
    distance = np.arange(masked.shape[1]) - np.argmax(masked, axis=1)[:, None]
    position = block_start[:, None] + np.arange(masked.shape[1])
    keys = key(d.streams[OF_IMPORTANCE], requests[:, None], position, evaluations)
    normal = d.factors[NORMAL][(keys >> np.uint64(54)).astype(np.intp)]
    deltas = d.deltas
    own = np.where(decodable, deltas[0] + deltas[1] * normal, deltas[2] + deltas[3] * normal)
    drawn: npt.NDArray[np.float32] = (own - deltas[4] * distance).astype(np.float32)
    return drawn


def retain(
    status: npt.NDArray[np.uint8],
    window: npt.NDArray[np.bool_],
    delta: npt.NDArray[np.float32],
    budgets: npt.NDArray[np.int64],
    progress: npt.NDArray[np.int32],
    sample_deviation: bool,
) -> npt.NDArray[np.bool_]:
    """The positions of each row's `window` that go on, [rows, width]; `delta` [rows, width] counts where masked."""
    keep = window.copy()
    for row in range(len(keep)):
        positions = np.flatnonzero(window[row] & (status[row] == MASKED))
        if len(positions) > budgets[row]:
            own = delta[row, positions]
            keep[row, positions] = retained(own, positions, int(budgets[row]), int(progress[row]), sample_deviation)
    return keep


def retained(
    delta: npt.NDArray[np.float32],
    positions: npt.NDArray[np.integer],
    budget: int,
    progress: int,
    sample_deviation: bool = False,
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
    std = np.sqrt(np.cumsum(np.square(wide - mean))[-1] / (num_masked - sample_deviation))
    selected: npt.NDArray[np.bool_] = wide >= mean + std
    if np.count_nonzero(selected) < budget:
        selected[:] = False
        selected[np.argsort(-delta, kind="stable")[:budget]] = True
    keep = selected.copy()
    keep[:-1] |= selected[1:] & (np.diff(positions) == 1)
    keep |= (positions < positions[keep].max()) & (positions > progress)
    return keep
