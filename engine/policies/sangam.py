"""Sangam: each block begins with a pass over the whole sequence; unused budget is saved for it (fleet.md 2.4).

The pass fills the cache and commits nothing; the block then decodes against all cached keys, as in Fast-dLLM. A request
with a complete block gives its pages back and waits for the next pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from ..admission import canvas, copy_list, head, queue_by_arrival
from ..hooks import decide, give_back, rows_updated
from ..jit import rule
from ..part import Answers, PagedMemory, Policy, Preset, Range
from ..rows.passes import PassScheduler, can_let_in, let_head_in, tokens_of_row
from ..state import DECODE_STEP, FREED, NOTHING, ROWS, RUNNING, PolicyState, Replica
from .fast_dllm import FastCache
from .llada import ONE_A_STEP


class DeficitFields(Protocol):
    max_batched_tokens: int
    saves: bool


class DeficitRecord(Protocol):
    deficit: int  # tokens saved for a pass that did not fit


DeficitState = PolicyState[DeficitFields, Any, DeficitRecord]

# Why admission stopped.
NONE_WAITS, NO_BUDGET, NO_ROOM = range(3)


@dataclass(frozen=True)
class SeparableCache(FastCache):
    """Fast-dLLM's cache, filled by a pass that commits nothing and may run on another replica (2.4)."""

    separable = True

    def numbers(self, policy: Any) -> dict[str, bool | int | float]:
        return {**super().numbers(policy), "separable": True, "once_more": False}


@dataclass(frozen=True)
class DeficitBudget(PassScheduler):
    """Sangam's worker: all rows decode in every step; whole-sequence passes take the rest of the budget (2.4).

    A pass is never cut, since its keys depend on the whole sequence: budget that the first waiting request could not
    use is saved.
    """

    max_batched_tokens: Annotated[int, Range(1), "tokens of a step: blocks in decode and whole sequences"] = 4096
    saves: Annotated[bool, "budget that a long pass could not use is saved; false: as on a prefill worker"] = True
    max_batch: Annotated[int | None, Range(1), "rows of a step; none: the device's default"] = 128
    max_num_logits: Annotated[int, Range(1), "rows of logits that may exist at once"] = 4096

    neutral = frozenset({"max_batched_tokens", "saves", "max_batch", "max_num_logits"})

    def record(self, policy: Policy) -> Mapping[str, Any]:
        return {"deficit": 0}

    def answers(self, policy: Policy) -> Answers:
        return {decide: decide_by_deficit, rows_updated: wait_for_pass}


@rule
def decide_by_deficit(replica: Replica, policy: DeficitState) -> int:
    """Run all decoding rows, and the waiting passes, in order, that budget and pages allow."""
    counters, fields, record = replica.counters, policy.fields, policy.record
    # Requests passed elsewhere stand first: their pages are reserved, and they only decode.
    while (
        counters.num_waiting > 0
        and counters.num_running < replica.fixed.max_batch
        and replica.requests[head(replica)[0]].arrived > 0
    ):
        replica.lists[RUNNING, counters.num_running] = let_head_in(replica, policy)
        counters.num_running += 1
    fresh = fields.max_batched_tokens
    for i in range(counters.num_running):
        fresh -= tokens_of_row(replica, policy, int(replica.lists[RUNNING, i]))
    budget = fresh + record.deficit
    admitted = 0
    stopped = NONE_WAITS
    while counters.num_waiting > 0 and stopped == NONE_WAITS:
        request, _ = head(replica)
        length = int(replica.asked.input_length[request]) + canvas(
            int(replica.asked.max_tokens[request]), int(replica.fixed.block)
        )
        # A worker without rows takes one pass of any length.
        if admitted + length > budget and counters.num_running > 0 and replica.requests[request].arrived == 0:
            stopped = NO_BUDGET
        elif counters.num_running == replica.fixed.max_batch or not can_let_in(replica, policy):
            stopped = NO_ROOM
        else:
            replica.lists[RUNNING, counters.num_running] = let_head_in(replica, policy)
            counters.num_running += 1
            admitted += length
    if stopped == NO_BUDGET and fields.saves:
        record.deficit = max(0, budget - admitted)
    elif stopped == NO_ROOM:
        record.deficit = max(0, record.deficit - max(0, admitted - fresh))
    else:
        record.deficit = 0
    copy_list(replica, RUNNING, ROWS, counters.num_running)
    counters.num_rows = counters.num_running
    return DECODE_STEP if counters.num_rows > 0 else NOTHING


@rule
def wait_for_pass(replica: Replica, policy: DeficitState) -> None:
    """Queue rows that begin a new block before requests that have not begun, in order of arrival."""
    counters = replica.counters
    left = 0
    for i in range(counters.num_running):
        slot = int(replica.lists[RUNNING, i])
        sequence = replica.sequences[slot]
        if sequence.block_steps > 0:
            replica.lists[RUNNING, left] = slot
            left += 1
        else:
            give_back(replica, policy, slot)
            replica.lists[FREED, counters.num_freed] = sequence.request
            counters.num_freed += 1
            queue_by_arrival(replica, int(sequence.request), slot)
    counters.num_running = left


PRESETS = {
    "sangam": Preset(
        Policy(
            "sangam",
            batching=DeficitBudget(),
            cache=SeparableCache(logits="block"),
            unmasking=ONE_A_STEP,
            memory=PagedMemory(page_size=16),
            implementation="sangam",
        ),
        "max_batched_tokens",
        "full-sequence: Sangam, passes over whole sequences under a token budget that is saved up",
        "Sangam (fleet.md 2.4)",
    )
}
