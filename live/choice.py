"""Which masks commit, with which tokens: the unmasking rule, with a family's additions."""

import numpy as np
import numpy.typing as npt

from ..engine.unmasking import Unmasking, dreams_share, unmask

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def choose(
    rule: Unmasking, tokens: Ints, confidence: Floats, masked: Bools, block_length: int, mask_token: int, step: Ints,
    *, scheduled: bool, predicted: Bools | None = None, first: Bools | None = None, first_token: bool = False,
    by_entropy: bool = False, threshold: float | None = None,
) -> tuple[Bools, Ints]:  # fmt: skip
    """The computed masks that commit, and all positions' tokens, both [rows, width].

    step [rows]: earlier steps of the block. scheduled: a full-sequence model, whose block ends after its steps.
    predicted: masks whose token is known. first: rows where only the block's first position commits; if set, a block's
    last step commits all of it (Dream). first_token, threshold: see `unmask`. by_entropy: Dream's schedule.

    A mask whose likeliest token is the mask stays (LLaDA's loop; errata 8), but counts as a token in the block's last
    step.
    """
    eligible = masked if predicted is None else masked & ~predicted
    steps = rule.denoising_steps or block_length
    last = (step >= steps - 1)[:, None]
    if by_entropy:
        chosen = np.where(last, masked, surest(confidence, eligible, dreams_share(eligible.sum(axis=1), step, steps)))
    else:
        chosen = unmask(rule, confidence, eligible, block_length, step if scheduled else None, first_token, threshold)
    chosen |= masked & ~eligible
    quota = scheduled and rule.strategy != "low_confidence_dynamic"
    if first is not None:
        begins = masked & (np.arange(masked.shape[1]) == 0)
        chosen = np.where(first[:, None], begins, masked & last | chosen if quota else chosen)
    unsettled = tokens == mask_token
    if not unsettled.any():
        return chosen, tokens
    if quota:
        return np.where(last, masked, chosen & ~unsettled), np.where(chosen, tokens, mask_token)
    return chosen & (~unsettled | last), tokens


def surest(confidence: Floats, masked: Bools, num: Ints) -> Bools:
    """The `num` [rows] most confident masks; ties go left."""
    order = np.argsort(np.where(masked, -confidence, np.inf), axis=1, kind="stable")
    best: Bools = masked & (np.argsort(order, axis=1) < num[:, None])
    return best
