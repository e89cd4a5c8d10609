"""SGLang's sync mode of a year ago: the batch changes between blocks, each as slow as its slowest."""

from dataclasses import dataclass
from typing import Annotated, Any

from ..errors import PolicyError
from ..hooks import decide, holds_back, pages_to_admit, step_over
from ..jit import rule
from ..part import Answers, Policy, Preset, Range, Scheduler, check_batch
from ..state import DENOISE, ROWS
from .lmdeploy import decide_continuous, end_group, pages_of_prefill


@dataclass(frozen=True)
class BlockSynchronous(Scheduler):
    """SGLang's sync mode: the batch changes between blocks, each as slow as its slowest (block-diffusion.md 2.3)."""

    max_batch: Annotated[int | None, Range(1), "sequences running; none: the device's default"] = None
    max_prefill_tokens: Annotated[int, Range(1), "padded prompt tokens of one prefill"] = 4096

    neutral = frozenset({"max_batch", "max_prefill_tokens"})

    def __post_init__(self) -> None:
        check_batch(self.max_batch, self.max_prefill_tokens)

    def check(self, policy: Policy) -> None:
        if policy.eviction.evicts or not policy.granularity.whole_block:
            raise PolicyError(f"{policy.name}: block-synchronous batching computes whole blocks, without eviction")

    def numbers(self, policy: Policy) -> dict[str, bool | int | float]:
        return {
            "decide_ahead": False, "fetch_nothing": False, "group_steps": 1, "prealloc": 0, "prefill_prealloc": 0,
            "reserve_past_end": False,
        }  # fmt: skip

    def answers(self, policy: Policy) -> Answers:
        return {
            decide: decide_continuous, step_over: round_step_over, holds_back: round_goes_on,
            pages_to_admit: pages_of_prefill,
        }  # fmt: skip


@rule
def round_goes_on(w: Any, x: Any) -> bool:
    """A round of blocks ends with the forward that every block entered complete (2.3)."""
    for i in range(w.c[0].num_rows):
        if w.q[w.lists[ROWS, i]].phase == DENOISE:
            return True
    return False


@rule
def round_step_over(w: Any, x: Any) -> None:
    """The batch changes where a round ends."""
    if not round_goes_on(w, x):
        end_group(w)


PRESETS = {
    "sglang-bd32": Preset(
        Policy("sglang-bd32", batching=BlockSynchronous()),
        "block_length",
        "SGLang's sync mode: the batch changes between blocks, each as slow as its slowest",
        "SGLang's first port, as FOCUS ran it (block-diffusion.md 2.3)",
    )
}
