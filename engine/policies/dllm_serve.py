"""dLLM-Serve: refreshes and reuses of many requests in a step, under a budget of query tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from ..admission import canvas, copy_list, head
from ..errors import PolicyError
from ..hooks import commit_rows, decide, plan_rows, work
from ..jit import rule
from ..part import MAX_BLOCK, Answers, Policy, Preset, Range, Scheduler, check_batch
from ..passes import can_let_in, commit_passes, let_head_in, plan_passes, tokens_of_row
from ..state import DECODE_STEP, NOTHING, ROWS, RUNNING, SCRATCH
from .llada import ONE_A_STEP, PAGES
from .sparse_dllm import SparseCache


@dataclass(frozen=True)
class PhaseMultiplexed(Scheduler):
    """dLLM-Serve: refreshes and reuses of many requests in one step, under a budget of query tokens (4.3).

    The fields' defaults are the published scheduler, step for step; each repairs one of its faults.
    """

    max_batched_tokens: Annotated[int, Range(1), "query tokens of a step"] = 16384
    max_batch: Annotated[int | None, Range(1), "requests running; none: the device's default"] = 512
    max_num_logits: Annotated[int, Range(1), "rows of logits that may exist at once (logit decomposition)"] = 1024
    hold_behind_stalled: Annotated[bool, "who stands behind a refresh that does not fit is not run either"] = True
    admit_past_stalled: Annotated[bool, "a waiting request may take the budget that a stalled one could not use"] = True
    newcomers_first: Annotated[bool, "... and stands before the stalled one from then on"] = True
    look_ahead: Annotated[bool, "admit only whom every step of the next block has room for"] = False
    first_token: Annotated[bool, "a block's first step commits its first token, as the code does (not the paper)"] = (
        True
    )

    full_sequence = True
    plans_rows = True
    neutral = frozenset(
        {
            "max_batched_tokens", "max_batch", "max_num_logits", "hold_behind_stalled", "admit_past_stalled",
            "newcomers_first", "look_ahead",
        }
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_batch(self.max_batch, self.max_num_logits, "max_num_logits")
        if self.max_batched_tokens < 1:
            raise PolicyError(f"max_batched_tokens is {self.max_batched_tokens}, expected at least 1")

    @property
    def max_prefill_tokens(self) -> int:  # type: ignore[override]
        """Memory to set aside, as a prefill of so many tokens would need it."""
        return self.max_num_logits

    @property
    def most_tokens(self) -> int:
        return self.max_batched_tokens

    def fits(self, policy: Policy, length: int) -> bool:
        # The published scheduler waits for ever for a request that is longer than a step may be.
        return length <= self.max_batched_tokens

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        return {"pads": self.pads}

    def record(self, policy: Policy) -> Mapping[str, Any]:
        each = policy.unmasking.denoising_steps or policy.block_length
        return {"loads": np.zeros(MAX_BLOCK, np.int64), "num_loads": each}

    def answers(self, policy: Policy) -> Answers:
        return {decide: decide_multiplexed, plan_rows: plan_passes, commit_rows: commit_passes}


@rule
def decide_multiplexed(w: Any, x: Any) -> int:
    """Select the rows of the next step under the token budget (dLLM-Serve, section 4)."""
    c, p = w.c[0], x.p[0]
    budget = p.max_batched_tokens
    most = w.f[0].max_batch
    used = 0
    for i in range(c.num_running):
        slot = w.lists[RUNNING, i]
        tokens = tokens_of_row(w, x, slot)
        w.q[slot].num_tokens = tokens
        used += tokens
    num = c.num_running
    first_stalled = num
    if used > budget or num > most:
        used = 0
        num = 0
        first_stalled = -1
        for i in range(c.num_running):
            slot = w.lists[RUNNING, i]
            tokens = w.q[slot].num_tokens
            if used + tokens <= budget and num < most:
                w.lists[ROWS, num] = slot
                used += tokens
                num += 1
            else:
                if first_stalled < 0:
                    first_stalled = i
                if p.hold_behind_stalled:
                    break
        if first_stalled < 0:
            first_stalled = c.num_running
    else:
        copy_list(w, RUNNING, ROWS, num)
    stalled = num < c.num_running
    new = 0
    if not stalled or p.admit_past_stalled:
        new = _let_in(w, x, num, used, budget, most)
    if new > 0:
        at = c.num_running
        if p.newcomers_first and stalled:
            at = first_stalled
        for i in range(c.num_running - 1, at - 1, -1):
            w.lists[RUNNING, i + new] = w.lists[RUNNING, i]
        for i in range(new):
            w.lists[RUNNING, at + i] = w.lists[SCRATCH, i]
            w.lists[ROWS, num + i] = w.lists[SCRATCH, i]
        c.num_running += new
    c.num_rows = num + new
    return DECODE_STEP if c.num_rows > 0 else NOTHING


@rule
def _let_in(w: Any, x: Any, num: Any, used: Any, budget: Any, most: Any) -> int:
    """Let in waiting requests beside `num` rows of `used` tokens; they are listed in SCRATCH."""
    c, f, p, m = w.c[0], w.f[0], x.p[0], x.m[0]
    loads = m.loads[: m.num_loads]
    new = 0
    if p.look_ahead:
        _count_loads(w, x, loads)
    while c.num_waiting > 0 and num + new < most:
        request, _ = head(w)
        length = int(w.asked.input_length[request]) + canvas(int(w.asked.max_tokens[request]), int(f.block))
        if used + length > budget or not can_let_in(w, x):
            break
        if p.look_ahead and not _has_room(w, x, request, length, budget, loads):
            break
        w.lists[SCRATCH, new] = let_head_in(w, x)
        new += 1
        used += length
    return new


@rule
def _count_loads(w: Any, x: Any, loads: Any) -> None:
    """Query tokens that running requests want in each step of the next block's time if none is ever stalled."""
    block, each = int(w.f[0].block), len(loads)
    loads[:] = 0
    for i in range(w.c[0].num_running):
        q = w.q[w.lists[RUNNING, i]]
        prompt = int(q.prompt)
        length = prompt + canvas(int(q.end) - prompt, block)
        for h in range(each):
            ahead = h + int(q.block_steps)
            start = int(q.start) + ahead // each * block
            if start < length:
                _, tokens, _ = work(prompt, length, start, int(q.steps) + h, ahead % each, block, x.p[0])
                loads[h] += tokens


@rule
def _has_room(w: Any, x: Any, request: Any, length: Any, budget: Any, loads: Any) -> bool:
    """Whether every step has room for a request that is let in now; if so its tokens are added to the loads."""
    prompt = int(w.asked.input_length[request])
    # One for no tokens is over with its first step.
    lasts = 1 if w.asked.max_tokens[request] == 0 else len(loads)
    for add in (False, True):
        for h in range(len(loads)):
            tokens = 0
            if h < lasts:
                _, tokens, _ = work(prompt, length, prompt, h, h, int(w.f[0].block), x.p[0])
            if not add and loads[h] + tokens > budget:
                return False
            if add:
                loads[h] += tokens
    return True


PRESETS = {
    "dllm-serve": Preset(
        Policy(
            "dllm-serve",
            batching=PhaseMultiplexed(),
            cache=SparseCache(logits="block", head_centric=True, at_least=1),
            unmasking=ONE_A_STEP,
            memory=PAGES,
        ),
        "retention",
        "full-sequence: dLLM-Serve, refreshes and reuses of many requests in a step, under a token budget",
        "dLLM-Serve (full-sequence-diffusion.md 4)",
        {
            "retention": {"low": 0.1, "high": 0.9, "step": 0.1}, "hold_behind_stalled": [False, True],
            "max_batched_tokens": [4096, 8192, 16384], "look_ahead": [False, True],
        },
    )
}  # fmt: skip
