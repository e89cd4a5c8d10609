"""The whole block, every step, and once more when complete: vanilla block diffusion."""

from dataclasses import dataclass
from typing import Annotated

from ..hooks import select, settle
from ..jit import rule
from ..part import MAX_BLOCK, Answers, Eviction, Granularity, Policy, Range
from ..state import CACHED, MASKED, PENDING, Evaluations, Marks, Status


@dataclass(frozen=True)
class FixedBlock(Granularity):
    """The whole block, every step (block-diffusion.md 1.3)."""

    block_length: Annotated[int, Range(1, MAX_BLOCK), "tokens of a block, as the checkpoint was trained"] = 32

    whole_block = True

    def answers(self, policy: Policy) -> Answers:
        if select not in policy.rows.asks:
            return {}
        if policy.eviction.delayed:  # leaves out cached positions
            return {select: select_pending_first}
        return {select: select_whole}


@dataclass(frozen=True)
class NoEviction(Eviction):
    def answers(self, policy: Policy) -> Answers:
        if settle not in policy.rows.asks:
            return {}
        return {settle: settle_block_pass}


@rule
def select_whole(status: Status, reach: int, chunk: int, fields: object, window: Marks) -> None:
    for k in range(reach):
        window[k] = True


@rule
def select_pending_first(status: Status, reach: int, chunk: int, fields: object, window: Marks) -> None:
    """Committed positions with stale KV, then the leftmost masks (W2, elastic-chunking.md 6.4 a)."""
    room = chunk
    for kind in (PENDING, MASKED):
        for k in range(reach):
            if room == 0:
                break
            matches = status[k] == kind  # branch-free: a branch would be unpredictable
            window[k] |= matches
            room -= matches


@rule
def settle_block_pass(
    status: Status, evaluations: Evaluations, window: Marks, block: int, fields: object, prefill: bool
) -> None:
    """KV of computed positions is final once no mask is left up to their block's end (block-diffusion.md 1.5).

    Only the pass over a decoded canvas may be cut and continued (sglang_0_5.py).
    """
    for k in range(len(status)):  # branch-free: vectorises
        evaluations[k] += window[k] & (status[k] == MASKED)
    begin = 0
    final = True
    while final and begin + block <= len(status):
        states, marks = status[begin : begin + block], window[begin : begin + block]  # from 0: vectorises
        computed = False
        masks = False
        for k in range(block):
            computed |= marks[k]
            masks |= states[k] == MASKED
        final = computed and not masks
        if final:
            for k in range(block):
                if marks[k]:
                    states[k] = CACHED
        begin += block
