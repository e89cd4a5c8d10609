"""A delayed cache: a committed token is no longer computed once computed as itself."""

from dataclasses import dataclass

from ..errors import PolicyError
from ..hooks import settle
from ..jit import rule
from ..part import Answers, Eviction, Policy, Preset
from ..state import CACHED, MASKED, PENDING, Evaluations, Marks, Status
from .lmdeploy_2025 import EVERY_STEP_AHEAD
from .whole_block import settle_block_pass


@dataclass(frozen=True)
class DelayedCache(Eviction):
    """A committed token is no longer computed once computed as itself (Optimus, elastic-chunking.md 6.1)."""

    evicts = True
    delayed = True
    visible = "listed"  # a query sees cached and computed positions of its block; "prefix": all up to the last one
    sample_block = False  # soft-max and sampling run on the whole block

    def numbers(self, policy: Policy) -> dict[str, bool | int | float]:
        return {"listed": self.visible == "listed", "sample_block": self.sample_block}

    def answers(self, policy: Policy) -> Answers:
        return {settle: settle_delayed}


@dataclass(frozen=True)
class FocusDelayedCache(DelayedCache):
    """The same as FOCUS runs it: a prefill leaves no final KV in the first block (focus.md 3.2, 3.6)."""

    visible = "prefix"
    sample_block = True

    def answers(self, policy: Policy) -> Answers:
        return {settle: settle_after_prefill}


@dataclass(frozen=True)
class NeighbourCache(FocusDelayedCache):
    """FOCUS's DC+: a committed token leaves only once its right neighbour was committed, too (focus.md 3.6)."""

    def check(self, policy: Policy) -> None:
        if not policy.granularity.whole_block:
            raise PolicyError(f"{policy.name}: {type(self).__name__} evicts from whole blocks, expected no chunk")

    def answers(self, policy: Policy) -> Answers:
        return {settle: settle_with_neighbour}


@rule
def settle_delayed(
    status: Status, evaluations: Evaluations, window: Marks, block: int, fields: object, prefill: bool
) -> None:
    """KV is final once a position is computed as a committed token."""
    for k in range(len(status)):  # branch-free: vectorises
        evaluations[k] += window[k] & (status[k] == MASKED)
        status[k] += window[k] & (status[k] == PENDING)  # CACHED is the next number


@rule
def settle_after_prefill(
    status: Status, evaluations: Evaluations, window: Marks, block: int, fields: object, prefill: bool
) -> None:
    if prefill:
        settle_block_pass(status, evaluations, window, block, fields, prefill)
    else:
        settle_delayed(status, evaluations, window, block, fields, prefill)


@rule
def settle_with_neighbour(
    status: Status, evaluations: Evaluations, window: Marks, block: int, fields: object, prefill: bool
) -> None:
    """KV is final once a position is computed as a committed token before a committed one."""
    if prefill:
        settle_block_pass(status, evaluations, window, block, fields, prefill)
        return
    width = len(status)
    # From the left: position k + 1 still has its old status.
    for k in range(width):
        evaluations[k] += window[k] & (status[k] == MASKED)
        if window[k] and status[k] == PENDING and (k == width - 1 or status[k + 1] != MASKED):
            status[k] = CACHED


PRESETS = {
    "delayed-cache": Preset(
        Policy("delayed-cache", batching=EVERY_STEP_AHEAD, eviction=FocusDelayedCache()),
        "block_length",
        "the block without the tokens that were computed once as committed",
        "FOCUS (focus.md 3.6)",
    ),
    "delayed-cache-plus": Preset(
        Policy("delayed-cache-plus", batching=EVERY_STEP_AHEAD, eviction=NeighbourCache()),
        "block_length",
        "FOCUS's DC+: ... computed once together with a committed right neighbour",
        "FOCUS (focus.md 3.6)",
    ),
}
