"""Sparse-dLLM: full passes of each block, the last of which chooses keys; then the block against them."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from ..errors import PolicyError
from ..hooks import held, work
from ..jit import plain, rule
from ..part import Preset, Range
from ..rows.passes import Ints, RowPosition
from ..state import FULL, PACK, REUSE
from .llada import NoCache, script


@rule
def kept(length: int, block: int, fields: Any) -> int:
    """Keys outside the block seen by reuse steps."""
    outside = length - block
    return min(outside, max(int(fields.at_least), int(np.floor(outside * fields.retention))))


@rule
def delayed_then_kept(
    prompt: int, length: int, start: int, step: int, block_step: int, block: int, fields: Any
) -> tuple[int, int, int]:
    """A full pass, a packing one, then the block against the kept keys."""
    if block_step == 0:
        return FULL, length, length
    if block_step == 1:
        return PACK, length, length
    return REUSE, block, kept(length, block, fields) + block


@rule
def kept_held(prompt: int, length: int, state: int, fields: Any) -> int:
    """The share of keys kept for the first block, the largest."""
    return max(max(1, int(fields.at_least)), int(np.ceil(length * fields.retention)))


@dataclass(frozen=True)
class SparseCache(NoCache):
    """Sparse-dLLM and dLLM-Serve: two full passes a block, the second of which chooses keys (2.1, 4.2).

    Other steps compute the block against the `retention` share of keys outside it, by pooled scores of the block's mean
    query: the same for all heads, or each its own (`head_centric`).
    """

    retention: Annotated[float, Range(0, 1), "share of the keys outside the block that is kept"] = 0.5
    pool_width: Annotated[int, Range(1), "positions over which a score is pooled, an odd number"] = 3
    head_centric: Annotated[bool, "each head keeps its own keys"] = False

    packs = True
    rules: ClassVar[dict[Any, Any]] = {work: delayed_then_kept, held: kept_held}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool_width % 2 == 0:
            raise PolicyError(f"pool_width is {self.pool_width}, expected an odd number")

    @property
    def at_least(self) -> int:
        """Least number of keys kept: dLLM-Serve keeps one."""
        return int(self.head_centric)

    def numbers(self, policy: Any) -> dict[str, bool | int | float]:
        return {**super().numbers(policy), "retention": float(self.retention), "at_least": self.at_least}

    def kept(self, position: RowPosition) -> Ints:
        """Keys outside the block seen by reuse steps, [requests]."""
        count = plain(kept)
        return np.array([count(length, position.block, self) for length in position.length.tolist()], np.int64)


PRESETS = {
    "sparse-dllm": Preset(
        policy=script("sparse-dllm", SparseCache(), "sparse-dllm"),
        main="retention",
        summary="full-sequence: Sparse-dLLM, two full passes a block, then the block against the keys kept",
        citation="Sparse-dLLM (full-sequence-diffusion.md 2.1)",
        space={"retention": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], "max_batch": [1, 4, 16]},
        probe="sparse-dllm,logits=block",
    )
}
