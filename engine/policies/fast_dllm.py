"""Fast-dLLM: a full pass a block, then the block against all cached keys."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from ..hooks import held, work
from ..jit import rule
from ..part import Choice, Preset
from ..state import FULL, REUSE
from .llada import NoCache, script

REUSES = ("dual", "prefix")


@rule
def first_whole(
    prompt: int, length: int, start: int, step: int, block_step: int, block: int, fields: Any
) -> tuple[int, int, int]:
    """A full pass as a block begins; then the block, with a prefix cache also all after it."""
    if block_step == 0:
        return FULL, length, length
    if fields.dual:
        return REUSE, block, length
    return REUSE, length - start, length


@rule
def all_held(prompt: int, length: int, state: int, fields: Any) -> int:
    """All positions."""
    return length


@dataclass(frozen=True)
class FastCache(NoCache):
    """Fast-dLLM: a full pass as a block begins, then the block against all cached keys (1.4).

    reuse: "dual" computes the block; "prefix" also all after it, cached for one step.
    """

    reuse: Annotated[str, Choice(REUSES), "compute the block, or the block and all after it"] = "dual"

    in_place = True
    rules: ClassVar[dict[Any, Any]] = {work: first_whole, held: all_held}

    @property
    def dual(self) -> bool:
        return self.reuse == "dual"

    def numbers(self, policy: Any) -> dict[str, bool | int | float]:
        # With a threshold, Fast-dLLM computes a block finished by its full pass once more.
        by_threshold = not policy.unmasking.scheduled(policy)
        return {**super().numbers(policy), "dual": self.dual, "once_more": by_threshold}


PRESETS = {
    "fast-dllm": Preset(
        policy=script("fast-dllm", FastCache(), "fast-dllm"),
        main="reuse",
        summary="full-sequence: Fast-dLLM, a full pass a block, then the block against all cached keys",
        citation="Fast-dLLM (full-sequence-diffusion.md 1.4)",
        space={"max_batch": [1, 4, 16]},
        probe="fast-dllm,logits=block",
    )
}
