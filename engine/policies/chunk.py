"""A fixed chunk of the block, which streams as its prefix is cached."""

from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from ..errors import PolicyError
from ..hooks import choose, select
from ..jit import rule
from ..part import BATCHING_SPACE, FITTED, MAX_BLOCK, Answers, Granularity, Policy, Preset, Range
from ..state import MASKED, Marks, PolicyState, Replica, Status
from .delayed_cache import DelayedCache
from .lmdeploy import EVERY_STEP
from .whole_block import select_pending_first


class ChunkFields(Protocol):
    chunk: int


ChunkState = PolicyState[ChunkFields, Any, Any]


class Streaming(Granularity):
    """At most a chunk of the block, over a delayed cache; with `obs` also of the next block."""

    def check(self, policy: Policy) -> None:
        if not policy.eviction.delayed:
            raise PolicyError(f"{policy.name}: eviction is none, expected a delayed cache, over which a chunk streams")
        if self.obs and policy.eviction.neighbour_aware:
            raise PolicyError(f"{policy.name}: neighbour_aware is true and obs is true: expected one of them")

    def answers(self, policy: Policy) -> Answers:
        return {select: select_a_mask_too if policy.eviction.neighbour_aware else select_pending_first}


@dataclass(frozen=True)
class FixedChunk(Streaming):
    """At most `chunk` positions of the block (elastic-chunking.md 6.2)."""

    # Tokens are computed twice: one position a step commits half a token.
    chunk: Annotated[int, Range(2, MAX_BLOCK), "positions computed per sequence and step, at most the block"] = 8
    block_length: Annotated[int, Range(1, MAX_BLOCK), "tokens of a block, as the checkpoint was trained"] = 32
    obs: Annotated[bool, "out-of-block streaming: the window may reach into the next block"] = False

    sized_by_block = "chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk > self.block_length:
            raise PolicyError(f"chunk is {self.chunk}, expected at most the block length {self.block_length}")

    def answers(self, policy: Policy) -> Answers:
        return {**super().answers(policy), choose: fixed_chunk}


@rule
def fixed_chunk(replica: Replica, policy: ChunkState) -> int:
    return int(policy.fields.chunk)


@rule
def select_a_mask_too(status: Status, reach: int, chunk: int, fields: ChunkFields, window: Marks) -> None:
    """W2 over a neighbour-aware cache: the last position gives way to a mask if no other would be cached.

    A committed position is cached only after its right neighbour commits: a window of committed positions before
    masks would otherwise never change.
    """
    select_pending_first(status, reach, chunk, fields, window)
    last = -1
    for k in range(reach):
        if not window[k]:
            continue
        if status[k] == MASKED or k == len(status) - 1 or status[k + 1] != MASKED:
            return
        last = k
    for k in range(reach):
        if last >= 0 and status[k] == MASKED:
            window[last] = False
            window[k] = True
            return


PRESETS = {
    "chunk": Preset(
        Policy("chunk", batching=EVERY_STEP, granularity=FixedChunk(), eviction=DelayedCache()),
        "chunk",
        "a fixed chunk of the block, streaming as tokens are cached",
        "Optimus, arXiv 2605.24832 (elastic-chunking.md 6.2)",
        {"chunk": list(range(2, 33, 2)), "obs": [False, True], FITTED: True, **BATCHING_SPACE},
    )
}
