"""Sangam (arXiv 2607.04206): each block begins with a pass over the whole sequence; unused budget is saved for it.

The pass fills the cache and commits; the block is then decoded against all cached keys, as in Fast-dLLM. A request with
a complete block frees its pages and waits for the next block's pass. The example leaves out what needs an engine of its
own: a pool for the passes, and more requests with pages than rows decode.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from dsim.engine.admission import copy_list, push_front
from dsim.engine.policies.dllm_serve import length_of_head
from dsim.engine.policies.fast_dllm import FastCache
from dsim.engine.policies.llada import ONE_A_STEP
from dsim.engine.rows.passes import PassScheduler, can_let_in, let_head_in, tokens_of_row
from dsim.engine.state import DECODE_STEP, FREED, NOTHING
from dsim.policy import ROWS, RUNNING, Answers, PagedMemory, Policy, PolicyState, Preset, Range, Replica, hooks, rule


class DeficitFields(Protocol):
    max_batched_tokens: int


class DeficitRecord(Protocol):
    deficit: int  # tokens saved for a pass that did not fit


DeficitState = PolicyState[DeficitFields, Any, DeficitRecord]


@dataclass(frozen=True)
class PassedCache(FastCache):
    """Fast-dLLM's cache; a block that its pass completes is not computed again."""

    def numbers(self, policy: Any) -> dict[str, bool | int | float]:
        return {**super().numbers(policy), "once_more": False}


@dataclass(frozen=True)
class DeficitBudget(PassScheduler):
    """Sangam's worker: decode rows first; passes over whole sequences take the remaining budget.

    Passes are never chunked, since keys depend on the whole sequence: budget left while requests wait is saved for the
    next step.
    """

    max_batched_tokens: Annotated[int, Range(1), "tokens of a step: blocks in decode and whole sequences"] = 4096
    max_batch: Annotated[int | None, Range(1), "running requests; none: the device's default"] = 128
    max_num_logits: Annotated[int, Range(1), "most rows of logits at once"] = 4096

    neutral = frozenset({"max_batched_tokens", "max_batch", "max_num_logits"})

    def record(self, policy: Policy) -> Mapping[str, Any]:
        return {"deficit": 0}

    def answers(self, policy: Policy) -> Answers:
        return {hooks.decide: decide_by_deficit, hooks.rows_updated: wait_for_pass}


@rule
def decide_by_deficit(replica: Replica, policy: DeficitState) -> int:
    """Run decode rows, and the waiting passes, in order, that budget and pages allow."""
    counters, fields, record = replica.counters, policy.fields, policy.record
    if counters.num_running == 0 and counters.num_waiting == 0:
        return NOTHING
    decoding = int(counters.num_running)
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
        length = length_of_head(replica)
        # Without rows one pass of any length is taken.
        if admitted + length > budget and counters.num_rows > 0:
            break
        if counters.num_running >= replica.fixed.max_batch or not can_let_in(replica, policy):
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
            hooks.give_back(replica, policy, slot)
            replica.lists[FREED, counters.num_freed] = sequence.request
            counters.num_freed += 1
            _queue_by_arrival(replica, int(sequence.request), slot)
    counters.num_running = left


@rule
def _queue_by_arrival(replica: Replica, request: int, slot: int) -> None:
    """Queue a sequence by arrival, before requests that were never admitted."""
    push_front(replica, request, slot)
    counters, last = replica.counters, len(replica.queue) - 1
    at = 1
    while at < counters.num_waiting:
        place = (counters.queue_head + at) & last
        other = int(replica.queue[place, 0])
        later = replica.arrival[other] > replica.arrival[request] or (
            replica.arrival[other] == replica.arrival[request] and other > request
        )
        if replica.queue[place, 1] < 0 or later:
            break
        for k in range(2):
            replica.queue[(counters.queue_head + at - 1) & last, k] = replica.queue[place, k]
        replica.queue[place, 0] = request
        replica.queue[place, 1] = slot
        at += 1


POLICY = Preset(
    Policy(
        "sangam",
        batching=DeficitBudget(),
        cache=PassedCache(logits="block"),
        unmasking=ONE_A_STEP,
        memory=PagedMemory(page_size=16),
    ),
    main="max_batched_tokens",
    summary="full-sequence: passes over whole sequences under a token budget that is saved up",
)
