"""One forward of a block under JointThreshold, LLaDA2.1's rule (production-dllm-serving.md 3.3).

Masks commit above `threshold`, the most confident always; settled tokens change above `edit_threshold`, until a forward
changes nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..engine.policies.sglang import JointThreshold

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def most_forwards(rule: JointThreshold, block_length: int) -> int:
    """Forwards of a block at most, if its likeliest token stays the mask: its masks, the edits and the end."""
    return block_length + rule.max_post_edit_steps + 1


@dataclass(frozen=True, slots=True, eq=False)
class Edited:
    """A block after a forward, [rows, block] but for `done`."""

    tokens: Ints
    committed: Bools  # masks that are tokens now
    edited: Bools  # tokens that have changed
    done: Bools  # [rows]: nothing changed, or the edits are used up; its keys and values are those of its tokens


def edit(
    rule: JointThreshold, tokens: Ints, likeliest: Ints, confidence: Floats, masked: Bools, may_edit: Bools, post: Ints
) -> Edited:
    """The outcome of a forward that gave each position's likeliest token and its probability, [rows, block].

    masked, may_edit [rows, block]: masks, and positions of the answer, not of the prompt. post [rows]: earlier forwards
    that began without a mask.
    """
    sure = masked & (confidence > rule.threshold)
    surest = np.argmax(np.where(masked, confidence, -np.inf), axis=1)
    sure[np.arange(len(masked)), surest] |= masked.any(axis=1)
    committed = sure & masked
    edited = ~masked & may_edit & (likeliest != tokens) & (confidence > rule.edit_threshold)
    without_masks = ~masked.any(axis=1)
    edited &= ~(without_masks & (post >= rule.max_post_edit_steps))[:, None]
    changed = committed | edited
    done = without_masks & ~changed.any(axis=1)
    return Edited(np.where(changed, likeliest, tokens), committed, edited, done)
