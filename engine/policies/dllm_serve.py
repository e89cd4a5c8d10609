"""dLLM-Serve: refreshes and reuses of many requests in a step, under a budget of query tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from ..admission import canvas, head
from ..hooks import decide, work
from ..jit import rule
from ..part import MAX_BLOCK, Answers, Policy, Preset, Range
from ..rows.passes import PassScheduler, can_let_in, let_head_in, tokens_of_row
from ..state import DECODE_STEP, NOTHING, ROWS, RUNNING, SCRATCH, AnyPolicy, Replica, running_slots
from .llada import ONE_A_STEP, PAGES
from .sparse_dllm import SparseCache


@dataclass(frozen=True)
class PhaseMultiplexed(PassScheduler):
    """dLLM-Serve's scheduler, step for step; `look_ahead` repairs a fault (4.3).

    As in its code and not in the paper, a waiting request may use budget that a stalled one cannot and then stays ahead
    of it, and a block's first step commits its first token.
    """

    max_batched_tokens: Annotated[int, Range(1), "query tokens of a step"] = 16384
    max_batch: Annotated[int | None, Range(1), "running requests; none: the device's default"] = 512
    max_num_logits: Annotated[int, Range(1), "most rows of logits at once (logit decomposition)"] = 1024
    look_ahead: Annotated[bool, "admit only requests that fit every step of the next block"] = False

    first_token = True

    @property
    def most_tokens(self) -> int:
        return self.max_batched_tokens

    def fits(self, policy: Policy, length: int) -> bool:
        # Longer ones would wait forever in the published scheduler.
        return length <= self.max_batched_tokens

    def record(self, policy: Policy) -> Mapping[str, Any]:
        num_loads = policy.unmasking.denoising_steps or policy.block_length
        return {"loads": np.zeros(MAX_BLOCK, np.int64), "num_loads": num_loads}

    def answers(self, policy: Policy) -> Answers:
        return {decide: decide_multiplexed}


@rule
def decide_multiplexed(replica: Replica, policy: AnyPolicy) -> int:
    """Select the next step's rows under the token budget (dLLM-Serve, section 4)."""
    counters = replica.counters
    budget = policy.fields.max_batched_tokens
    limit = replica.fixed.max_batch
    used = 0
    num = 0  # rows; requests behind a refresh that does not fit do not run either
    for slot in running_slots(replica):
        tokens = tokens_of_row(replica, policy, slot)
        if used + tokens > budget or num == limit:
            break
        replica.lists[ROWS, num] = slot
        used += tokens
        num += 1
    new = _let_in(replica, policy, num, used, budget, limit)
    for i in range(counters.num_running - 1, num - 1, -1):
        replica.lists[RUNNING, i + new] = replica.lists[RUNNING, i]
    for i in range(new):
        replica.lists[RUNNING, num + i] = replica.lists[SCRATCH, i]
        replica.lists[ROWS, num + i] = replica.lists[SCRATCH, i]
    counters.num_running += new
    counters.num_rows = num + new
    if counters.num_rows == 0:
        return NOTHING
    return DECODE_STEP


@rule
def length_of_head(replica: Replica) -> int:
    """Prompt and canvas of the first waiting request, in tokens."""
    request, _ = head(replica)
    return int(replica.asked.input_length[request]) + canvas(
        int(replica.asked.max_tokens[request]), replica.fixed.block
    )


@rule
def _let_in(replica: Replica, policy: AnyPolicy, num: int, used: int, budget: int, limit: int) -> int:
    """Admit waiting requests after `num` rows of `used` tokens; lists them in SCRATCH."""
    counters, fields, record = replica.counters, policy.fields, policy.record
    loads = record.loads[: record.num_loads]
    new = 0
    if fields.look_ahead:
        _count_loads(replica, policy, loads)
    while counters.num_waiting > 0 and num + new < limit:
        request, _ = head(replica)
        length = length_of_head(replica)
        if used + length > budget or not can_let_in(replica, policy):
            break
        if fields.look_ahead and not _has_room(replica, policy, request, length, budget, loads):
            break
        replica.lists[SCRATCH, new] = let_head_in(replica, policy)
        new += 1
        used += length
    return new


@rule
def _count_loads(replica: Replica, policy: AnyPolicy, loads: npt.NDArray[np.int64]) -> None:
    """Running requests' query tokens in each step of the next block, if none stalls."""
    block, steps = replica.fixed.block, len(loads)
    loads[:] = 0
    for slot in running_slots(replica):
        sequence = replica.sequences[slot]
        prompt = int(sequence.prompt)
        length = prompt + canvas(int(sequence.end) - prompt, block)
        for h in range(steps):
            ahead = h + int(sequence.block_steps)
            start = int(sequence.start) + ahead // steps * block
            if start < length:
                _, tokens, _ = work(prompt, length, start, int(sequence.steps) + h, ahead % steps, block, policy.fields)
                loads[h] += tokens


@rule
def _has_room(
    replica: Replica, policy: AnyPolicy, request: int, length: int, budget: int, loads: npt.NDArray[np.int64]
) -> bool:
    """Whether every step has room for a request admitted now; if so, adds its tokens to the loads."""
    prompt = int(replica.asked.input_length[request])
    # A request for no tokens has one step.
    lasts = len(loads)
    if replica.asked.max_tokens[request] == 0:
        lasts = 1
    for add in (False, True):
        for h in range(len(loads)):
            tokens = 0
            if h < lasts:
                _, tokens, _ = work(prompt, length, prompt, h, h, replica.fixed.block, policy.fields)
            if not add and loads[h] + tokens > budget:
                return False
            if add:
                loads[h] += tokens
    return True


PRESETS = {
    "dllm-serve": Preset(
        policy=Policy(
            "dllm-serve",
            batching=PhaseMultiplexed(),
            cache=SparseCache(logits="block", head_centric=True),
            unmasking=ONE_A_STEP,
            memory=PAGES,
            implementation="dllm-serve",
        ),
        main="retention",
        summary="full-sequence: dLLM-Serve, refreshes and reuses of many requests in a step, under a token budget",
        citation="dLLM-Serve (full-sequence-diffusion.md 4)",
        space={
            "retention": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
            "max_batched_tokens": [4096, 8192, 16384],
            "look_ahead": [False, True],
        },
    )
}
