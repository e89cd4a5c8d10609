"""Sangam: each block begins with a pass over the whole sequence; unused budget is saved for it (fleet.md 2.4).

The pass fills the cache and commits; the block is then decoded against all cached keys, as in Fast-dLLM. A request with
a complete block frees its pages and waits for the next block's pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from ..admission import canvas, copy_list, head, queue_by_arrival
from ..hooks import decide, give_back, rows_updated, steady
from ..jit import rule
from ..part import Answers, PagedMemory, Policy, Preset, Range
from ..rows.passes import PassScheduler, can_let_in, let_head_in, tokens_of_row
from ..state import (
    DECODE_STEP,
    FREED,
    NO,
    NOTHING,
    ROWS,
    RUNNING,
    UNTIL_A_REQUEST,
    PolicyState,
    Replica,
)
from .fast_dllm import FastCache
from .llada import ONE_A_STEP


class DeficitFields(Protocol):
    max_batched_tokens: int


class DeficitRecord(Protocol):
    deficit: int  # tokens saved for a pass that did not fit


DeficitState = PolicyState[DeficitFields, Any, DeficitRecord]


@dataclass(frozen=True)
class SeparableCache(FastCache):
    """Fast-dLLM's cache, which computes no finished block once more."""

    def numbers(self, policy: Any) -> dict[str, bool | int | float]:
        return {**super().numbers(policy), "once_more": False}


@dataclass(frozen=True)
class DeficitBudget(PassScheduler):
    """Sangam's worker: decode rows first; passes over whole sequences take the remaining budget (2.4).

    Passes are never chunked, since keys depend on the whole sequence: budget left while requests wait is saved for the
    next step. Requests past their pass wait with their pages while `max_batch` rows decode.
    """

    max_batched_tokens: Annotated[int, Range(1), "tokens of a step: blocks in decode and whole sequences"] = 4096
    max_batch: Annotated[int | None, Range(1), "rows in decode; none: the device's default"] = 128
    max_num_logits: Annotated[int, Range(1), "most rows of logits at once"] = 4096

    neutral = frozenset({"max_batched_tokens", "max_batch", "max_num_logits"})
    admits_past_rows = True

    def record(self, policy: Policy) -> Mapping[str, Any]:
        return {"deficit": 0}

    def answers(self, policy: Policy) -> Answers:
        answers = {decide: decide_by_deficit, rows_updated: wait_for_pass}
        return answers | ({steady: steady_deficit} if policy.leaps else {})


@rule
def decide_by_deficit(replica: Replica, policy: DeficitState) -> int:
    """Run decode rows, and the waiting passes, in order, that budget and pages allow."""
    counters, fields, record = replica.counters, policy.fields, policy.record
    if counters.num_running == 0 and counters.num_waiting == 0:
        return NOTHING
    # The first to have run their pass.
    decoding = min(int(counters.num_running), int(replica.fixed.max_batch))
    copy_list(replica, RUNNING, ROWS, decoding)
    fresh = fields.max_batched_tokens
    for i in range(decoding):
        fresh -= tokens_of_row(replica, policy, int(replica.lists[RUNNING, i]))
    budget = fresh + record.deficit
    waits = counters.num_waiting > 0
    admitted = 0
    no_room = False
    counters.num_rows = decoding
    while counters.num_waiting > 0:
        request, _ = head(replica)
        length = int(replica.asked.input_length[request]) + canvas(
            int(replica.asked.max_tokens[request]), int(replica.fixed.block)
        )
        # Without rows one pass of any length is taken.
        if admitted + length > budget and counters.num_rows > 0:
            break
        if not can_let_in(replica, policy):
            no_room = True
            break
        slot = let_head_in(replica, policy)
        replica.lists[RUNNING, counters.num_running] = slot
        counters.num_running += 1
        replica.lists[ROWS, counters.num_rows] = slot
        counters.num_rows += 1
        admitted += length
    if not waits:
        record.deficit = 0
    elif no_room:
        record.deficit = max(0, record.deficit - max(0, admitted - fresh))
    else:
        record.deficit = max(0, budget - admitted)
    return DECODE_STEP if counters.num_rows > 0 else NOTHING


@rule
def steady_deficit(replica: Replica, policy: DeficitState) -> int:
    """All rows run again while none waits; a waiting pass changes the saved budget each step."""
    counters = replica.counters
    if counters.num_rows != counters.num_running or policy.record.deficit > 0:
        return NO
    return UNTIL_A_REQUEST if counters.num_waiting == 0 else NO


@rule
def wait_for_pass(replica: Replica, policy: DeficitState) -> None:
    """Queue rows that begin a block before requests that have not begun, by arrival."""
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
