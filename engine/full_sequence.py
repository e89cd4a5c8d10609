"""The engine of full-sequence models: every step is a denoising step of a request, a full pass or a cheap one.

State, journal and accounts are those of engine.py; what differs is what may run together, and what a row computes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from .batching import PhaseMultiplexed, Static
from .cache import ExactCache, Standing, Work
from .engine import Engine, Ints, _Waiting
from .latency import Features
from .policy import Policy
from .request import Request
from .rows import MASKED, PENDING
from .step import Phase, StepOutcome, StepPlan


def engine_for(policy: Policy, *arguments: Any, **more: Any) -> Engine:
    """The engine that a policy runs on."""
    return (FullSequenceEngine if policy.full_sequence else Engine)(policy, *arguments, **more)


class FullSequenceEngine(Engine):
    """One replica's scheduler for policies with an approximate cache; see Engine.

    A request's canvas is its output rounded up to whole blocks that begin where its prompt ends. Its length is fixed,
    and so are its pages: they are held from admission to the end, and nobody is preempted.
    """

    def __init__(self, policy: Policy, *arguments: Any, **more: Any) -> None:
        super().__init__(policy, *arguments, **more)
        assert not isinstance(policy.cache, ExactCache)
        self._cache = policy.cache
        self._steps_per_block = policy.unmasking.denoising_steps or self._block
        self._leaps = False

    # ---- schedule --------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        assert self._plan is None, "a step is still in flight"
        batching = self.policy.batching
        known = None
        if isinstance(batching, Static):
            slots = self._same_batch()
        else:
            assert isinstance(batching, PhaseMultiplexed)
            known = self._work_of(self._running)
            slots = self._multiplex(batching, known[1].tokens)
            if slots is not self._running:
                known = None
        if not len(slots):
            if self._waiting or len(self._running):
                raise RuntimeError(f"idle with {len(self._waiting)} waiting and {len(self._running)} running")
            return None
        plan = self._plan = self._plan_pass(now, slots, *(known or self._work_of(slots)))
        self.num_steps += 1
        return plan

    def _same_batch(self) -> Ints:
        """The batch in hand, or when it is done the first of those that wait."""
        if self._group is None:
            taken: list[int] = []
            while self._waiting and len(taken) < self.limits.max_batch and self._has_pages(self._waiting[0]):
                taken.append(self._admit_head())
            self._running = np.array(taken, np.int32)
            self._group = self._running if taken else None
        return self._running

    def _multiplex(self, batching: PhaseMultiplexed, cost: npt.NDArray[np.int64]) -> Ints:
        """Who runs next under the token budget, in the published scheduler's order (4.3); cost: tokens of who runs."""
        budget, most = batching.max_batched_tokens, self.limits.max_batch
        fits = np.ones(len(self._running), np.bool_)
        used = int(cost.sum())
        if used > budget or len(fits) > most:
            fits[:] = False
            used = num = 0
            for i, tokens in enumerate(cost.tolist()):
                if used + tokens <= budget and num < most:
                    fits[i] = True
                    used, num = used + tokens, num + 1
                elif batching.hold_behind_stalled:
                    break
        batch, stalled = self._running[fits], self._running[~fits]
        newcomers: list[int] = []
        if not len(stalled) or batching.admit_past_stalled:
            ahead = self._loads(self._running) if batching.look_ahead else None
            while self._waiting and len(batch) + len(newcomers) < most:
                head = self._waiting[0]
                length = head.request.input_length + self._canvas(head.request.output_length)
                if used + length > budget or not self._has_pages(head):
                    break
                if ahead is not None:
                    more = ahead + self._loads_of(head.request)
                    if more.max() > budget:
                        break
                    ahead = more
                newcomers.append(self._admit_head())
                used += length
        if not newcomers:
            return batch if len(stalled) else self._running
        new = np.array(newcomers, np.int32)
        first = int(np.argmin(fits)) if len(stalled) else len(fits)
        self._running = np.insert(self._running, first if batching.newcomers_first else len(fits), new)
        return np.concatenate([batch, new])

    def _loads(self, slots: Ints) -> npt.NDArray[np.int64]:
        """Query tokens that requests want in each step of the next block's time if none is ever stalled."""
        if not len(slots):
            return np.zeros(self._steps_per_block, np.int64)
        at, each = self._standing(slots), self._steps_per_block
        ahead = np.arange(each)[:, None] + at.block_step
        start = at.start + ahead // each * self._block
        want = []
        for h in range(each):
            then = Standing(at.prompt, at.length, start[h], at.step + h, ahead[h] % each, at.block)
            want.append(np.where(start[h] < at.length, self._cache.work(then).tokens, 0).sum())
        return np.array(want, np.int64)

    def _loads_of(self, request: Request) -> npt.NDArray[np.int64]:
        """The same of a request that is let in now."""
        each = self._steps_per_block
        ones = np.ones(each, np.int64)
        length = request.input_length + self._canvas(request.output_length)
        steps = np.arange(each)
        at = Standing(
            request.input_length * ones, length * ones, request.input_length * ones, steps, steps, self._block
        )  # fmt: skip
        # One for no tokens is over with its first step.
        lasts = 1 if request.output_length == 0 else each
        return np.where(steps < lasts, self._cache.work(at).tokens, 0)

    def _has_pages(self, head: _Waiting) -> bool:
        return self._pages_of(head.request) <= self.limits.num_pages - self.pages_held

    def _admit_head(self) -> int:
        """Let in the request that has waited longest."""
        head = self._waiting.popleft()
        slot = self._place(head, head.request.input_length + self._block, self._pages_of(head.request))
        self._seqs.steps[slot] = self._seqs.block_steps[slot] = 0
        return slot

    def _pages_of(self, request: Request) -> int:
        prompt = np.array([request.input_length], np.int64)
        length = prompt + self._canvas(request.output_length)
        return self._pages_for(int(self._cache.held(prompt, length, self.limits.state_tokens)[0]))

    def fits(self, request: Request) -> bool:
        batching = self.policy.batching
        length = request.input_length + self._canvas(request.output_length)
        # The published scheduler waits for ever for a request that is longer than a step may be.
        if isinstance(batching, PhaseMultiplexed) and length > batching.max_batched_tokens:
            return False
        return self._pages_of(request) <= self.limits.num_pages and length <= self.limits.context_limit

    def _work_of(self, slots: Ints) -> tuple[Standing, Work]:
        """Where requests stand, and what their next step does."""
        at = self._standing(slots)
        return at, self._cache.work(at)

    def _standing(self, slots: Ints) -> Standing:
        """Where requests stand; those of a static batch as padded to its longest prompt and output."""
        q = self._seqs
        prompt, start = q.prompt[slots].astype(np.int64), q.start[slots].astype(np.int64)
        canvas = (q.end[slots] - q.prompt[slots] + (self._block - 1)) // self._block * self._block
        if isinstance(self.policy.batching, Static) and len(slots):
            # All are at the same block, those included that have none left.
            start = np.full_like(start, prompt.max() + (start - prompt).max())
            prompt = np.full_like(prompt, prompt.max())
            canvas = np.full_like(canvas, canvas.max())
        steps = q.steps[slots].astype(np.int64)
        return Standing(prompt, prompt + canvas, start, steps, q.block_steps[slots].astype(np.int64), self._block)

    def _plan_pass(self, now: float, slots: Ints, at: Standing, work: Work) -> StepPlan:
        status = self._seqs.status[slots]
        window = np.ones_like(status, np.bool_)
        # A request for no tokens has no block, and one that a static batch carries along has none left.
        over = self._seqs.start[slots] >= self._seqs.end[slots]
        window[over] = False
        index = self._seqs.request[slots]
        fresh = index[np.isnan(self.table["scheduled"][index])]
        self.table["scheduled"][fresh] = now
        head = int(self._cache.head_rows(at, work.tokens).sum())
        pairs = int((work.tokens * work.keys).sum())
        features = Features(int(work.tokens.sum()), pairs, int(work.keys.sum()), head, head, len(slots), 0)
        phases = np.where(over & self._seqs.prefilled[slots], np.uint8(Phase.IDLE), work.phases)
        return self._new_plan(
            now, False, slots, phases, work.tokens.astype(np.int32), work.keys.astype(np.int32), window, status,
            self._block, features,
        )  # fmt: skip

    # ---- commit ----------------------------------------------------------------------------------------------

    def commit(self, outcome: StepOutcome, now: float) -> Ints:
        plan = self._plan
        assert plan is not None, "no step is in flight"
        self._plan = None
        q, slots, committed = self._seqs, plan.slots, outcome.committed
        assert committed.shape == plan.window.shape, f"{committed.shape} commits for a window of {plan.window.shape}"
        assert not (committed & ~(plan.window & (plan.status == MASKED))).any(), "only computed masks commit"
        assert outcome.retained is None, "the plan evicts nothing"
        self._account(plan, outcome)
        self._first_commits(slots, committed, now)
        first = slots[~q.prefilled[slots]]
        q.prefilled[first] = True
        self.outstanding_tokens -= int(q.prompt[first].sum())
        q.evaluations[slots] += plan.window & (plan.status == MASKED)
        status = plan.status.copy()
        status[committed] = PENDING
        q.status[slots] = status
        q.steps[slots] += 1
        q.block_steps[slots] += 1
        static = isinstance(self.policy.batching, Static)
        if self.emit == "step" and not static:
            self._emit_prefixes(slots, now)
        if static:
            done = self._end_together(slots, now)
        else:
            done = slots[(q.end[slots] == q.prompt[slots]) & ~q.finished[slots]]
            complete = slots[~(status == MASKED).any(axis=1) & (q.start[slots] < q.end[slots])]
            self._finish(done, now)
            if len(complete):  # which in most steps none is
                done = np.concatenate([done, self._publish(complete, now)])
                self._next_block(complete[~q.finished[complete]])
        if len(done):
            self._release(done)
            self._running = self._running[~q.finished[self._running]]
        indices: Ints = q.request[done]
        return indices

    def _end_together(self, slots: Ints, now: float) -> Ints:
        """A static batch goes from block to block as one, and hands out nothing before its longest request is done."""
        q = self._seqs
        # Who has no block left is carried along.
        live = slots[q.start[slots] < q.end[slots]]
        if (q.status[live] == MASKED).any():
            return slots[:0]
        self._next_block(live)
        q.block_steps[slots] = 0
        if (q.start[slots] < q.end[slots]).any():
            return slots[:0]
        self._group = None
        index, tokens = q.request[slots], q.end[slots] - q.prompt[slots]
        self.table["first_block"][index[tokens > 0]] = now
        if self.emit != "end":
            self._emit(slots[tokens > 0], tokens[tokens > 0], now)
        self._finish(slots, now)
        return slots

    def _next_block(self, slots: Ints) -> None:
        self._advance(slots)
        self._seqs.block_steps[slots] = 0
