"""A buffer of several blocks of a row in flight: Diffulex, D2F, d3LLM (several-blocks.md 1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ..errors import PolicyError
from ..hooks import columns_in_reach, opens, select
from ..jit import rule
from ..part import BATCHING_SPACE, FITTED, MAX_BLOCK, Answers, Granularity, Policy, Preset, Range
from ..rows.blocks import BLOCKS
from ..state import MASKED, AnyPolicy, Evaluations, Replica, Status
from .lmdeploy_2025 import EVERY_STEP
from .whole_block import select_whole

# Of untrained models, at confidences of 0.95; at 0.70 it is 0.2 (several-blocks.md 3).
UNTRAINED = 0.15


@dataclass(frozen=True)
class Buffer(Granularity):
    """Up to `num_blocks` blocks of a row at once; all opened ones are computed in every step.

    A block is a dummy until it is opened, active while it or an earlier one has masks, then to be cached by the next
    step, which computes it and all earlier ones without masks; then it leaves. Blocks commit apart, each by its own
    frontier, and leave in order.
    """

    num_blocks: Annotated[int, Range(1, 8), "blocks of a row in flight"] = 2
    block_length: Annotated[int, Range(1, MAX_BLOCK), "tokens of a block, as the checkpoint was trained"] = 32
    open_at: Annotated[float, Range(0, 1), "share of the last opened block without masks at which the next opens"] = 0.1
    force_at: Annotated[
        float, Range(0, 1), "share of a block without masks from which the next commits its best mask if none passes"
    ] = 0.9
    static: Annotated[bool, "compute all blocks, opened or not, as captured graphs do"] = True
    ahead: Annotated[float, Range(0, 1), "factor of a mask's odds for each earlier block that has masks"] = UNTRAINED

    caution = (
        "tokens a step rest on `ahead`, calibrated to four published runs of untrained models (0.15) or a guess for "
        "trained ones (0.4); a checkpoint not trained for several blocks answers less accurately"
    )

    @property
    def ahead_of(self) -> tuple[float, ...]:
        return self.ahead, self.force_at

    def forces(self, status: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Whether at least its best mask commits of each block, [rows, num_blocks]; status [rows, width]."""
        progress = (status != MASKED).reshape(len(status), -1, self.block_length).mean(axis=2)
        far: npt.NDArray[np.bool_] = progress >= self.force_at
        return np.pad(far[:, :-1], ((0, 0), (1, 0)), constant_values=True)

    def check(self, policy: Policy) -> None:
        if policy.eviction.evicts or policy.rows is not BLOCKS:
            raise PolicyError(f"{policy.name}: several blocks in flight, expected no eviction and continuous batching")
        if policy.unmasking.strategy != "low_confidence_dynamic":
            raise PolicyError(
                f"{policy.name}: strategy is {policy.unmasking.strategy}, expected low_confidence_dynamic for several "
                "blocks in flight"
            )

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        return {"listed": True, "ordered": True}

    def answers(self, policy: Policy) -> Answers:
        return {columns_in_reach: opened_columns, opens: opens_by_progress, select: select_whole}


@rule
def opened_columns(replica: Replica, policy: AnyPolicy, slot: int) -> int:
    """Columns of a row's opened blocks, after it has opened at most one more (several-blocks.md 1.1)."""
    sequence, block, status = replica.sequences[slot], int(replica.fixed.block), replica.status[slot]
    opened = num_opened(status, replica.evaluations[slot], block)
    start, last = int(sequence.start), int(sequence.stop) - 1
    room = opened * block < replica.fixed.width and start + opened * block < sequence.end
    ended = last < start or (last - start < len(status) and status[last - start] != MASKED)
    if opened == 0 or (room and not ended and opens(status, opened, block, policy.fields)):
        opened += 1
    return opened * block


@rule
def num_opened(status: Status, evaluations: Evaluations, block: int) -> int:
    """Blocks that a step has computed: their positions are committed or were evaluated."""
    num = 0
    last = block - 1
    while last < len(status) and (status[last] != MASKED or evaluations[last] > 0):
        num += 1
        last += block
    return num


@rule
def opens_by_progress(status: Status, opened: int, block: int, fields: Buffer) -> bool:
    """Whether the last opened block has come far enough; tokens of the prompt count."""
    done = 0
    for p in range((opened - 1) * block, opened * block):
        done += status[p] != MASKED
    return done >= fields.open_at * block


SPACE = {"num_blocks": [1, 2, 4], "open_at": [0.1, 0.9], FITTED: True, **BATCHING_SPACE}
SOURCE = "Diffulex at 184ba97, arXiv 2606.29215 (several-blocks.md 1, 3)"

PRESETS = {
    "multi-block": Preset(
        Policy("multi-block", batching=EVERY_STEP, granularity=Buffer()),
        "num_blocks",
        "several blocks of a row in flight, training-free: accuracy falls, odds are calibrated to published pairs",
        SOURCE,
        SPACE,
    ),
    "multi-block-trained": Preset(
        Policy("multi-block-trained", batching=EVERY_STEP, granularity=Buffer(ahead=0.4)),
        "num_blocks",
        "... on a model trained for it (D2F, d3LLM): no pair is published, and `ahead` is a guess between 0.15 and 1",
        SOURCE,
        SPACE,
    ),
}
