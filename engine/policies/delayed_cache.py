"""A delayed cache: a committed token is no longer computed once computed as itself."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

from ..hooks import settle
from ..jit import rule
from ..part import Answers, Choice, Eviction, Policy, Preset
from ..state import CACHED, MASKED, PENDING, Evaluations, Marks, Status
from .lmdeploy import EVERY_STEP_AHEAD
from .whole_block import settle_block_pass


class DelayedFields(Protocol):
    neighbour_aware: bool
    prefill_counts: bool


@dataclass(frozen=True)
class DelayedCache(Eviction):
    """A committed token is no longer computed once computed as itself (elastic-chunking.md 6.1).

    neighbour_aware: only if its right neighbour was committed too (FOCUS's DC+, focus.md 3.6).
    """

    neighbour_aware: Annotated[bool, "cache a token only once its right neighbour is committed, too (FOCUS's DC+)"] = (
        False
    )
    prefill_counts: Annotated[bool, "prefill leaves final KV in the prompt's part of the first block (FOCUS: not)"] = (
        True
    )
    visible: Annotated[
        str,
        Choice(("listed", "prefix")),
        "what a query sees of its block: cached or computed positions, or all up to the last one",
    ] = "listed"
    sample_block: Annotated[bool, "soft-max and sampling run on the whole block (FOCUS, focus.md 3.2)"] = False

    evicts = True
    delayed = True
    neutral = frozenset({"sample_block"})

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        return {"listed": self.visible == "listed"}

    def answers(self, policy: Policy) -> Answers:
        return {settle: settle_delayed}


@rule
def settle_delayed(
    status: Status, evaluations: Evaluations, window: Marks, block: int, fields: DelayedFields, prefill: bool
) -> None:
    """KV is final once a position is computed as a committed token (neighbour_aware: before a committed one)."""
    if prefill and not fields.prefill_counts:
        settle_block_pass(status, evaluations, window, block, fields, prefill)
        return
    width = len(status)
    for k in range(width):
        evaluations[k] += window[k] & (status[k] == MASKED)
    if not fields.neighbour_aware:
        for k in range(width):
            status[k] = CACHED if window[k] & (status[k] == PENDING) else status[k]
        return
    # From the left: position k + 1 still has its old status.
    for k in range(width):
        if window[k] and status[k] == PENDING and (k == width - 1 or status[k + 1] != MASKED):
            status[k] = CACHED


FOCUS_CACHE = DelayedCache(prefill_counts=False, visible="prefix", sample_block=True)

PRESETS = {
    "delayed-cache": Preset(
        Policy("delayed-cache", batching=EVERY_STEP_AHEAD, eviction=FOCUS_CACHE),
        "block_length",
        "the block without the tokens that were computed once as committed",
        "FOCUS (focus.md 3.6)",
    ),
    "delayed-cache-plus": Preset(
        Policy("delayed-cache-plus", batching=EVERY_STEP_AHEAD, eviction=replace(FOCUS_CACHE, neighbour_aware=True)),
        "block_length",
        "FOCUS's DC+: ... computed once together with a committed right neighbour",
        "FOCUS (focus.md 3.6)",
    ),
}
