"""LMDeploy's scheduler of 2025: groups of steps with a frozen batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ..admission import (
    canvas,
    copy_list,
    count_rows,
    head,
    let_in,
    place,
    pop,
    preempt,
    prefill_length,
    release,
    take_next,
)
from ..commits import MOST_STEPS
from ..errors import PolicyError
from ..hooks import (
    decide,
    hold,
    paged_ahead,
    pages_to_admit,
    placed,
    preempted,
    reusable,
    reuse,
    rows_updated,
    steady,
    step_over,
)
from ..jit import rule
from ..part import BATCHING_SPACE, FITTED, Answers, Policy, Preset, Range, Scheduler
from ..prefix import caches_prefixes
from ..state import (
    DECODE_STEP,
    GROUP,
    NEXT,
    NO,
    NOTHING,
    PREFILL_STEP,
    ROWS,
    RUNNING,
    SCRATCH,
    UNTIL_A_REQUEST,
    WHATEVER,
    AnyPolicy,
    Replica,
    num_arrived,
    running_slots,
    step_slots,
)

UNBOUNDED = 1 << 40  # tokens
PREFILL_INTERVAL = 16  # LMDeploy's setting; bounds the steps of a group and the pages it reserves


@dataclass(frozen=True)
class Continuous(Scheduler):
    """LMDeploy: prefill first; decode in groups of steps with a frozen batch (block-diffusion.md 2.1)."""

    max_batch: Annotated[
        int | None, Range(1), "running sequences; none: the device's default, at most a prefill's block rows"
    ] = None
    max_prefill_tokens: Annotated[int, Range(1), "padded prompt tokens of one prefill"] = 4096
    num_loops: Annotated[
        int | None, Range(1, MOST_STEPS), "steps of a group; none: min(16, 2 * (page // block_length))"
    ] = None
    decide_ahead: Annotated[bool, "decide the next batch when a group's last step begins (LMDeploy's prefetch)"] = False

    def check(self, policy: Policy) -> None:
        if policy.commits_by == "acceptance" and self.num_loops not in (None, 1):
            raise PolicyError(f"{policy.name}: num_loops is {self.num_loops}, expected 1 for one token a step")

    def group_steps(self, page_size: int, block_length: int) -> int:
        if self.num_loops is not None:
            return self.num_loops
        return max(1, min(PREFILL_INTERVAL, 2 * (page_size // block_length)))

    def reserved(self, policy: Policy, prompt: Any, output: Any, state_tokens: int = 1) -> Any:
        block = policy.block_length
        tokens = -(-(prompt + output) // block) * block
        return tokens - block + policy.width + self._prealloc(policy)  # when its last block begins

    def _steps(self, policy: Policy) -> int:
        if policy.commits_by == "acceptance":
            return 1
        return self.group_steps(policy.memory.page_size, policy.block_length)

    def _prealloc(self, policy: Policy) -> int:
        """Tokens reserved beyond the window: blocks that a group may enter (block-diffusion.md 2.1)."""
        page, block, steps = policy.memory.page_size, policy.block_length, self._steps(policy)
        if steps == 1:
            return 0
        # A block takes at least two steps, or one if streaming ran ahead.
        entered = steps
        if policy.granularity.num_blocks == 1:
            entered = (steps + 1) // 2
        return max(min(PREFILL_INTERVAL // 2, page // block), entered) * block

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        return {"group_steps": self._steps(policy), "prealloc": self._prealloc(policy)}

    def answers(self, policy: Policy) -> Answers:
        answers: dict[Any, Any] = {
            decide: decide_continuous,
            step_over: group_step_over,
            pages_to_admit: pages_of_prefill,
        }
        if policy.commits_by != "acceptance":
            answers[rows_updated] = order_by_update
        if policy.leaps and not self.decide_ahead and not caches_prefixes(policy):
            answers |= {steady: steady_batch, paged_ahead: paged_ahead_of_batch}
        return answers


@rule
def decide_continuous(replica: Replica, policy: AnyPolicy) -> int:
    """Continue the frozen group, run the step decided ahead, or decide; then decide ahead if configured."""
    counters, fields = replica.counters, policy.fields
    if counters.num_group >= 0:
        copy_list(replica, GROUP, ROWS, counters.num_group)
        counters.num_rows = counters.num_group
        kind = DECODE_STEP
    else:
        kind = take_next(replica)
    while True:  # `_decide` stands here once, since each call compiles it again
        ahead = kind != NOTHING
        if kind == DECODE_STEP and counters.num_group < 0:
            copy_list(replica, ROWS, GROUP, counters.num_rows)
            counters.num_group = counters.num_rows
            counters.loops_left = fields.group_steps
        if ahead and not (fields.decide_ahead and (kind == PREFILL_STEP or counters.loops_left == 1)):
            return kind
        decision = _decide(replica, policy, NEXT if ahead else ROWS, kind)
        if ahead:
            counters.next_kind = decision
        if ahead or decision == NOTHING:
            return kind
        kind = decision


@rule
def _decide(replica: Replica, policy: AnyPolicy, target: int, in_flight: int) -> int:
    """Choose prefill or decode and its sequences, without rows of a step `in_flight`."""
    counters, fixed, fields = replica.counters, replica.fixed, policy.fields
    if in_flight != NOTHING:
        for slot in step_slots(replica):
            replica.sequences[slot].in_flight = True
    seat_arrived(replica, policy)
    ready = 0
    for slot in running_slots(replica):
        if not replica.sequences[slot].in_flight:
            ready += 1
    kind = NOTHING
    num = 0
    if _prefers_prefill(counters.num_waiting, ready, fixed.max_batch, fields.decide_ahead):
        num = admit(replica, policy, target)
        if num > 0:
            kind = PREFILL_STEP
        elif in_flight != NOTHING:  # then LMDeploy fetches no decode batch either (`enable_empty`)
            ready = -1
    if kind == NOTHING:
        # LMDeploy prefetches a decode batch only if enough sequences are not in flight.
        least = 0
        if in_flight == PREFILL_STEP:
            least = 1
        elif in_flight == DECODE_STEP:
            least = fixed.max_batch // 4 + 1
        if ready >= least:
            num = _make_room(replica, policy, target)
            if num > 0:
                kind = DECODE_STEP
    if in_flight != NOTHING:
        for slot in step_slots(replica):
            replica.sequences[slot].in_flight = False
    count_rows(replica, target, num)
    return kind


@rule
def _prefers_prefill(waiting: int, ready: int, max_batch: int, ahead: bool) -> bool:
    """Whether to prefill next, if `ready` sequences could decode.

    When deciding ahead few are ready, so waiting requests are nearly always admitted.
    """
    return waiting > 0 and (not ahead or waiting >= 4 or ready < 0.5 * max_batch)


@rule
def seat_arrived(replica: Replica, policy: AnyPolicy) -> None:
    """Let requests whose prompt came over a link decode at once; their first block has the prompt's tail."""
    counters, fixed = replica.counters, replica.fixed
    while counters.num_waiting > 0 and counters.num_running < fixed.max_batch and _has_arrived(replica):
        if _seat(replica, policy, UNBOUNDED)[0] < 0:
            return


@rule
def _has_arrived(replica: Replica) -> bool:
    request, slot = head(replica)
    return slot < 0 and num_arrived(replica, request) > 0


@rule
def admit(replica: Replica, policy: AnyPolicy, target: int) -> int:
    """Admit the next prefill's requests, first come, first served; returns their number."""
    counters, fixed = replica.counters, replica.fixed
    num = 0
    tokens = 0
    while counters.num_waiting > 0 and counters.num_running < fixed.max_batch and not _has_arrived(replica):
        limit = UNBOUNDED
        if num > 0:
            limit = fixed.max_prefill - tokens
        slot, length = _seat(replica, policy, limit)
        if slot < 0:
            break
        replica.lists[target, num] = slot
        num += 1
        tokens += length
    return num


@rule
def _seat(replica: Replica, policy: AnyPolicy, limit: int) -> tuple[int, int]:
    """Give the queue's first request pages and a slot; returns the slot and the tokens of its prefill.

    The slot is -1 without pages, or if the prefill has more than `limit` tokens.
    """
    counters, fixed = replica.counters, replica.fixed
    request, slot = head(replica)
    length = prefill_length(replica, request, slot)
    # The last block is always computed: prefill is its first denoising step.
    cached, shared_pages = reusable(replica, policy, request, length - fixed.block)
    pages = pages_to_admit(replica, policy, request, slot, length)
    if length - cached > limit or pages - shared_pages > fixed.num_pages - counters.pages_held:
        return -1, 0
    pop(replica)
    new = slot < 0
    slot = place(replica, request, slot, length, pages)
    if new:
        placed(replica, policy, slot)
    reuse(replica, policy, slot, cached)
    hold(replica, policy, slot, length - fixed.block)
    let_in(replica, slot)
    return slot, length - cached


@rule
def pages_of_prefill(replica: Replica, policy: AnyPolicy, request: int, slot: int, length: int) -> int:
    """Pages for the prompt, within the request's canvas."""
    fixed, requests = replica.fixed, replica.asked
    longest = canvas(int(requests.input_length[request]) + int(requests.max_tokens[request]), fixed.block)
    return -(-min(length, longest) // fixed.page)


@rule
def _make_room(replica: Replica, policy: AnyPolicy, target: int) -> int:
    """Grow running sequences' pages for the coming group; preempt the last until the rest fit."""
    counters, fixed = replica.counters, replica.fixed
    num = 0
    total = 0
    for slot in running_slots(replica):
        if not replica.sequences[slot].in_flight:
            needed = _pages_needed(replica, policy, slot)
            replica.lists[target, num] = slot
            replica.lists[SCRATCH, num] = needed
            num += 1
            total += needed - replica.sequences[slot].pages
    while num > 0 and counters.pages_held + total > fixed.num_pages:
        last = replica.lists[target, num - 1]
        total -= replica.lists[SCRATCH, num - 1] - replica.sequences[last].pages
        preempt(replica, policy, last)
        preempted(replica, policy, last)
        num -= 1
    for i in range(num):
        replica.sequences[replica.lists[target, i]].pages = replica.lists[SCRATCH, i]
    if num > 0:
        counters.pages_held += total
    for i in range(num):
        slot = replica.lists[target, i]
        hold(replica, policy, slot, int(replica.sequences[slot].start))
    return num


@rule
def _pages_needed(replica: Replica, policy: AnyPolicy, slot: int) -> int:
    """Pages for a sequence's tokens and the next group's growth; at least those it holds."""
    sequence, fixed = replica.sequences[slot], replica.fixed
    tokens = int(sequence.start) + fixed.width + policy.fields.prealloc
    return max(-(-tokens // fixed.page), int(sequence.pages))


@rule
def order_by_update(replica: Replica, policy: AnyPolicy) -> None:
    """Move the step's rows to the end: LMDeploy preempts the last updated (block-diffusion.md 2.1)."""
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        sequence.in_flight = not sequence.finished
    num = 0
    for slot in running_slots(replica):
        if not replica.sequences[slot].in_flight:
            replica.lists[RUNNING, num] = slot
            num += 1
    for slot in step_slots(replica):
        if replica.sequences[slot].in_flight:
            replica.sequences[slot].in_flight = False
            replica.lists[RUNNING, num] = slot
            num += 1


@rule
def steady_batch(replica: Replica, policy: AnyPolicy) -> int:
    """A batch only takes more pages: requests that had to wait do so until a sequence ends.

    Unless pages came back from outside since the step began.
    """
    counters = replica.counters
    if counters.num_preempted > 0 or counters.pages_held < counters.pages:
        return NO
    if counters.waiting > 0:
        return WHATEVER
    if counters.num_waiting == 0:
        return UNTIL_A_REQUEST
    return NO


@rule
def paged_ahead_of_batch(replica: Replica, policy: AnyPolicy) -> int:
    """As in `_pages_needed`."""
    return replica.fixed.width + int(policy.fields.prealloc)


@rule
def group_step_over(replica: Replica, policy: AnyPolicy) -> None:
    """End a frozen group after its last step; finished sequences then leave."""
    counters = replica.counters
    counters.loops_left -= 1
    if counters.loops_left == 0:
        end_group(replica, policy)


@rule
def end_group(replica: Replica, policy: AnyPolicy) -> None:
    counters = replica.counters
    counters.num_group = -1
    release(replica, policy, ROWS, counters.num_rows)


EVERY_STEP = Continuous(num_loops=1)  # no frozen groups
EVERY_STEP_AHEAD = Continuous(num_loops=1, decide_ahead=True)

# LMDeploy's flag for each field (lmdeploy/cli/utils.py).
FLAGS = {
    "gpus": "--tp",
    "block_length": "--dllm-block-length",
    "strategy": "--dllm-unmasking-strategy",
    "threshold": "--dllm-confidence-threshold",
    "denoising_steps": "--dllm-denoising-steps",
    "max_batch": "--max-batch-size",
    "max_prefill_tokens": "--max-prefill-token-num",
    "page_size": "--cache-block-seq-len",
}

PRESETS = {
    "lmdeploy-bd32": Preset(
        policy=Policy("lmdeploy-bd32", batching=Continuous(decide_ahead=True)),
        main="block_length",
        summary="LMDeploy of 2025: the whole block every step, groups of frozen steps, a pass over each finished block",
        citation="LMDeploy's fork of December 2025, as FOCUS ran it (block-diffusion.md 2.1)",
        space={FITTED: True, **BATCHING_SPACE, "num_loops": ["none", 1, 2, 4, 8]},
        reference=True,
        engine="lmdeploy-0.11",
        serve="--backend pytorch",
        flags=FLAGS,
    )
}
