"""A fixed chunk of the block, which streams as its prefix is cached."""

from dataclasses import dataclass
from typing import Annotated

from ..errors import PolicyError
from ..hooks import choose, select
from ..jit import rule
from ..part import BATCHING_SPACE, FITTED, MAX_BLOCK, Answers, Granularity, Policy, Preset, Range
from ..state import AnyPolicy, Replica
from .delayed_cache import DelayedCache
from .lmdeploy_2025 import EVERY_STEP
from .whole_block import select_pending_first


class Streaming(Granularity):
    """At most a chunk of the block, over a delayed cache; with `num_blocks=2` also of the next block."""

    def check(self, policy: Policy) -> None:
        if not policy.eviction.delayed:
            raise PolicyError(f"{policy.name}: eviction is none, expected a delayed cache, over which a chunk streams")

    def answers(self, policy: Policy) -> Answers:
        return {select: select_pending_first}


@dataclass(frozen=True)
class FixedChunk(Streaming):
    """At most `chunk` positions of the block (elastic-chunking.md 6.2)."""

    # Tokens are computed twice: one position a step commits half a token.
    chunk: Annotated[int, Range(2, MAX_BLOCK), "positions computed per sequence and step, at most the block"] = 8
    block_length: Annotated[int, Range(1, MAX_BLOCK), "tokens of a block, as the checkpoint was trained"] = 32
    num_blocks: Annotated[int, Range(1, 2), "2: out-of-block streaming, the window may reach into the next block"] = 1

    sized_by_block = "chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk > self.block_length:
            raise PolicyError(f"chunk is {self.chunk}, expected at most the block length {self.block_length}")

    def answers(self, policy: Policy) -> Answers:
        return {**super().answers(policy), choose: fixed_chunk}


@rule
def fixed_chunk(replica: Replica, policy: AnyPolicy) -> int:
    return int(policy.fields.chunk)


PRESETS = {
    "chunk": Preset(
        Policy("chunk", batching=EVERY_STEP, granularity=FixedChunk(), eviction=DelayedCache()),
        "chunk",
        "a fixed chunk of the block, streaming as tokens are cached",
        "Optimus, arXiv 2605.24832 (elastic-chunking.md 6.2)",
        {"chunk": list(range(2, 33, 2)), "num_blocks": [1, 2], FITTED: True, **BATCHING_SPACE},
    )
}
