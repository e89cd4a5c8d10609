"""A block's forward under JointThreshold, LLaDA2.1's rule (production-dllm-serving.md 3.3).

Masks above `threshold` commit, at least the most confident; settled tokens change above `edit_threshold`; a forward
that changes nothing ends the block.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..engine.policies.sglang import JointThreshold

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def most_forwards(rule: JointThreshold, block_length: int) -> int:
    """Most forwards of a block whose likeliest tokens stay masks: masks, edits, the end."""
    return block_length + rule.max_post_edit_steps + 1


@dataclass(frozen=True, slots=True, eq=False)
class Edited:
    """A block after a forward; [rows, block] except `done`."""

    tokens: Ints
    committed: Bools  # masks that became tokens
    edited: Bools  # tokens that changed
    done: Bools  # [rows]: nothing changed or no edits are left; KV matches the tokens


def edit(
    rule: JointThreshold, tokens: Ints, likeliest: Ints, confidence: Floats, masked: Bools, may_edit: Bools, post: Ints
) -> Edited:
    """Apply each position's likeliest token and its probability, [rows, block].

    masked, may_edit [rows, block]: masks; positions of the answer. post [rows]: earlier forwards that began without
    masks.
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
