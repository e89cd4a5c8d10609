"""Sangam: each block begins with a pass over the whole sequence; unused budget is saved for it (fleet.md 2.4).

The pass fills the cache and commits; the block is then decoded against all cached keys, as in Fast-dLLM. A request with
a complete block frees its pages and waits for the next block's pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from ..admission import canvas, copy_list, head, queue_by_arrival
from ..draw import Draws, draw_slot, scheduled_row
from ..hooks import decide, draw_rows, give_back, rows_updated, steady
from ..jit import rule
from ..part import Answers, PagedMemory, Policy, Preset, Range
from ..rows.passes import PassScheduler, can_let_in, let_head_in, tokens_of_row
from ..state import (
    DECODE_STEP,
    FREED,
    MASKED,
    NO,
    NOTHING,
    PENDING,
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
    saves: bool
    scheduled: bool


class DeficitRecord(Protocol):
    deficit: int  # tokens saved for a pass that did not fit


DeficitState = PolicyState[DeficitFields, Any, DeficitRecord]


@dataclass(frozen=True)
class SeparableCache(FastCache):
    """Fast-dLLM's cache, with passes that another replica may run (2.4)."""

    separable = True

    def numbers(self, policy: Any) -> dict[str, bool | int | float]:
        return {**super().numbers(policy), "once_more": False, "scheduled": policy.unmasking.scheduled(policy)}

    def answers(self, policy: Any) -> dict[Any, Any]:
        return {**super().answers(policy), draw_rows: draw_passed}


@dataclass(frozen=True)
class DeficitBudget(PassScheduler):
    """Sangam's worker: decode rows first; passes over whole sequences take the remaining budget (2.4).

    Passes are never chunked, since keys depend on the whole sequence: budget left while requests wait is saved for the
    next step. Requests past their pass wait with their pages while `max_batch` rows decode.
    """

    max_batched_tokens: Annotated[int, Range(1), "tokens of a step: blocks in decode and whole sequences"] = 4096
    saves: Annotated[bool, "save budget that a long pass could not use; false: as on a prefill worker"] = True
    max_batch: Annotated[int | None, Range(1), "rows in decode; none: the device's default"] = 128
    max_num_logits: Annotated[int, Range(1), "most rows of logits at once"] = 4096

    neutral = frozenset({"max_batched_tokens", "saves", "max_batch", "max_num_logits"})
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
    # Requests passed elsewhere come first: their pages are reserved, and they only decode.
    while (
        counters.num_waiting > 0
        and counters.num_running < replica.fixed.max_batch
        and replica.requests[head(replica)[0]].arrived > 0
    ):
        replica.lists[RUNNING, counters.num_running] = let_head_in(replica, policy)
        counters.num_running += 1
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
        passed = replica.requests[request].arrived > 0
        # Without rows one pass of any length is taken.
        if not passed and admitted + length > budget and counters.num_rows > 0:
            break
        if passed or not can_let_in(replica, policy):
            no_room = True
            break
        slot = let_head_in(replica, policy)
        replica.lists[RUNNING, counters.num_running] = slot
        counters.num_running += 1
        replica.lists[ROWS, counters.num_rows] = slot
        counters.num_rows += 1
        admitted += length
    if not waits or not fields.saves:
        record.deficit = 0
    elif no_room:
        record.deficit = max(0, record.deficit - max(0, admitted - fresh))
    else:
        record.deficit = max(0, budget - admitted)
    return DECODE_STEP if counters.num_rows > 0 else NOTHING


@rule
def draw_passed(replica: Replica, policy: DeficitState, draws: Draws) -> None:
    """Draw the step's commits, with those of passes that other replicas ran: draws are keyed, so they are the same."""
    for i in range(replica.counters.num_rows):
        slot = int(replica.lists[ROWS, i])
        _draw(replica, policy, slot, draws)
        if _passed_elsewhere(replica, slot):
            _draw(replica, policy, slot, draws)
            _join_pass(replica, slot)


@rule
def _draw(replica: Replica, policy: DeficitState, slot: int, draws: Draws) -> None:
    window, committed = replica.window[slot], replica.committed[slot]
    if policy.fields.scheduled:
        scheduled_row(replica.status[slot], replica.evaluations[slot], window, committed, draws)
    else:
        draw_slot(replica, slot, window, committed, draws)


@rule
def _passed_elsewhere(replica: Replica, slot: int) -> bool:
    """Whether the commits just drawn are those of a pass that another replica ran; if so, they are applied."""
    sequence = replica.sequences[slot]
    if sequence.steps > 0 or sequence.block_steps == 0:
        return False
    for k in range(replica.window.shape[1]):
        if replica.committed[slot, k]:
            replica.status[slot, k] = PENDING
        elif replica.window[slot, k]:
            replica.evaluations[slot, k] += 1
    return True


@rule
def _join_pass(replica: Replica, slot: int) -> None:
    """Add the commits of the pass to those of the step."""
    for k in range(replica.window.shape[1]):
        if replica.status[slot, k] == PENDING:
            replica.committed[slot, k] = True
            replica.status[slot, k] = MASKED


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
