"""Which masks commit, with which tokens: the unmasking rule, with a family's additions."""

import numpy as np
import numpy.typing as npt

from ..engine.spec import Policy
from ..engine.unmasking import dreams_share, unmask

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def choose(
    policy: Policy,
    tokens: Ints,
    confidence: Floats,
    masked: Bools,
    step: Ints,
    *,
    mask_token: int,
    threshold: float | None,
    first: Bools | None = None,
    by_entropy: bool = False,
    forces: Bools | None = None,
) -> tuple[Bools, Ints]:
    """The computed masks that commit, and all positions' tokens, both [rows, width].

    step [rows]: earlier steps of the block. threshold: see `unmask`. first: rows where only the block's first position
    commits; if set, a block's last step commits all of it (Dream). by_entropy: Dream's schedule. forces: see `unmask`.

    A mask whose likeliest token is the mask stays (LLaDA's loop; errata 8), but counts as a token in the block's last
    step.
    """
    rule, block = policy.unmasking, policy.block_length
    steps = rule.denoising_steps or block
    last = (step >= steps - 1)[:, None]
    quota, schedule = False, None
    if policy.family == "full-sequence":  # a block ends after its steps
        quota, schedule = rule.strategy != "low_confidence_dynamic", step
    if by_entropy:
        share = dreams_share(masked.sum(axis=1), step, steps)
        chosen = np.where(last, masked, surest(confidence, masked, share))
    else:
        first_token = policy.batching.first_token
        chosen = unmask(rule, confidence, masked, block, schedule, first_token, threshold, forces=forces)
    if first is not None:
        begins = masked & (np.arange(masked.shape[1]) == 0)
        chosen = np.where(first[:, None], begins, chosen | (masked & last & quota))
    unsettled = tokens == mask_token
    if quota and unsettled.any():
        return np.where(last, masked, chosen & ~unsettled), np.where(chosen, tokens, mask_token)
    return chosen & (~unsettled | last), tokens


def surest(confidence: Floats, masked: Bools, num: Ints) -> Bools:
    """The `num` [rows] most confident masks; ties go left."""
    order = np.argsort(np.where(masked, -confidence, np.inf), axis=1, kind="stable")
    best: Bools = masked & (np.argsort(order, axis=1) < num[:, None])
    return best
