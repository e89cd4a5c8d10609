"""JointThreshold, LLaDA2.1's rule: masks commit and settled tokens are edited, until a forward changes nothing.

Pure arithmetic of one forward of a block (production-dllm-serving.md 3.3), for the engine's policy of that name.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class JointThreshold:
    """A mask commits above `threshold`, the surest always; a settled token gives way above `edit_threshold`.

    The numbers are those of the engine's policy of that name.
    """

    threshold: float
    edit_threshold: float
    max_post_edit_steps: int  # forwards after the last mask is gone

    def most(self, block_length: int) -> int:
        """Forwards of a block at most, were its likeliest token the mask for ever: its masks, the edits and the end."""
        return block_length + self.max_post_edit_steps + 1


@dataclass(frozen=True, slots=True, eq=False)
class Edited:
    """A block after a forward, [rows, block] but for `done`."""

    tokens: Ints
    committed: Bools  # masks that are tokens now
    edited: Bools  # tokens that are others now
    done: Bools  # [rows]: nothing changed, or the edits are used up; its keys and values are those of its tokens


def edit(
    rule: JointThreshold, tokens: Ints, said: Ints, confidence: Floats, masked: Bools, may_edit: Bools, post_steps: Ints
) -> Edited:
    """Take a forward in: said and confidence [rows, block], each position's likeliest token and its probability.

    masked, may_edit [rows, block]: masks, and positions whose tokens are the answer's and not the prompt's.
    post_steps [rows]: forwards that the row had without a mask on entry, before this one.
    """
    sure = masked & (confidence > rule.threshold)
    surest = np.argmax(np.where(masked, confidence, -np.inf), axis=1)
    sure[np.arange(len(masked)), surest] |= masked.any(axis=1)
    committed = sure & masked
    edited = ~masked & may_edit & (said != tokens) & (confidence > rule.edit_threshold)
    without_masks = ~masked.any(axis=1)
    used_up = without_masks & (post_steps >= rule.max_post_edit_steps)
    edited &= ~used_up[:, None]
    changed = committed | edited
    done = without_masks & ~changed.any(axis=1)
    return Edited(np.where(changed, said, tokens), committed, edited, done)
