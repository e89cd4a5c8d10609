"""The serving engine, with neither clock nor device: it decides what runs next and keeps account of what ran."""

from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from . import compiled, rows
from .batching import BlockSynchronous, Continuous
from .errors import DsimError
from .eviction import SCOPES, DelayedCache, Focus
from .focus import budget
from .granularity import CommitCurve, ElasticChunk, FixedChunk, choose_chunk
from .journal import STATUSES, RequestTable, StepRecorder, StepTotals
from .latency import Features, LatencyModel
from .leap import LEAP_COLUMNS, Cost, Draws, Requests, Setting, Steps, Tally, leap
from .policy import Policy
from .request import Request
from .rows import BLOCK_PASS, CACHED, DELAYED, MASKED, NEIGHBOUR, PENDING
from .sequences import sequences
from .step import Evicting, Phase, StepOutcome, StepPlan

COMPLETED, REJECTED, UNFINISHED = range(len(STATUSES))
EMIT = ("block", "step", "end")

Ints = npt.NDArray[np.int32]

MANY = 1 << 60
_NO_CURVE = np.zeros(1)
_NO_CHUNKS = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Limits:
    """What a replica can hold."""

    num_pages: int  # KV pages of the pool
    context_limit: int  # tokens of a sequence, prompt and output
    max_batch: int  # sequences running
    max_prefill_tokens: int | None = None  # of one prefill; None: as the policy has it
    state_tokens: int = 1  # tokens' worth of KV that the outputs of a token's attention and feed-forward take


@dataclass(slots=True)
class _Waiting:
    """A request in the queue. A preempted one keeps the slot that holds its progress; a new one has none."""

    request: Request
    slot: int = -1


class Engine:
    """One replica's scheduler and its sequences' state.

    plan = engine.schedule(now); outcome = <step model or GPU>(plan); engine.commit(outcome, now)

    `table` receives what becomes of each request. `latency` is needed by an elastic chunk alone, for T(c, b).
    `fast=False` runs the plain rules instead of their compiled twins, with the same results.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        table: RequestTable,
        *,
        replica: int = 0,
        latency: LatencyModel | None = None,
        emit: str = "block",
        fast: bool = True,
    ) -> None:
        if emit not in EMIT:
            raise DsimError(f"emit is {emit!r}, expected one of {', '.join(EMIT)}")
        self.policy = policy
        self.limits = limits
        self.table = table
        self.replica = replica
        self.emit = emit
        self.totals = StepTotals(num_pages=limits.num_pages)
        self.outstanding_tokens = 0  # tokens still to prefill or to return, of every request not finished
        self.submitted = 0
        self.num_steps = 0
        self.pages_held = 0
        self._rules: ModuleType = compiled if fast else rows
        self._latency = latency
        self._block = policy.block_length
        self._width = self._block * (2 if policy.obs else 1)
        self._page = policy.memory.page_size
        self._ar = policy.autoregressive
        batching = policy.batching
        self._max_prefill = limits.max_prefill_tokens or batching.max_prefill_tokens
        self._group_steps = 1
        self._ahead = False
        if isinstance(batching, Continuous):
            self._group_steps = batching.group_steps(self._page, self._block) if not self._ar else 1
            self._ahead = batching.decide_ahead
        self._synchronous = not isinstance(batching, Continuous)
        # Pages are reserved for the blocks that a frozen group may enter (block-diffusion.md 2.1).
        self._prealloc = 0
        if isinstance(batching, Continuous) and self._group_steps > 1:
            blocks = min(batching.prefill_interval // 2, self._page // self._block)
            # Two steps a block at the fastest, one when streaming runs ahead: a group may be asked to be longer.
            entered = self._group_steps if policy.obs else (self._group_steps + 1) // 2
            self._prealloc = max(blocks, entered) * self._block
        self._rule, self._prefill_rule, self._listed = _cache_rules(policy)
        self._sample_block = isinstance(policy.eviction, DelayedCache) and policy.eviction.sample_block
        granularity = policy.granularity
        self._pending_first = True
        if isinstance(granularity, FixedChunk | ElasticChunk):
            self._pending_first = granularity.window == "pending-first"
        self._chunk = granularity.chunk if isinstance(granularity, FixedChunk) else self._block
        self._elastic: ElasticChunk | None = None
        if isinstance(granularity, ElasticChunk):
            if latency is None:
                raise DsimError(f"policy {policy.name} chooses by T(c, b) and was given no latency model")
            self._elastic = granularity
            self._chunk = 0  # none chosen yet
            self._chunks = np.array(granularity.chunks(), np.int64)
            self.curve = CommitCurve(self._width, granularity.estimator == "robust", granularity.memory)
            self._latencies: dict[int, npt.NDArray[np.float64]] = {}
            self._prefix = np.zeros((2, self._width + 1), np.int64)

        self._focus = policy.eviction if isinstance(policy.eviction, Focus) else None
        self._leaps = fast and isinstance(batching, Continuous)
        self._setting = Setting(
            self._ar, self._block, self._width, self._page, limits.num_pages, self._rule, self._pending_first,
            self._listed, self._sample_block, policy.obs, EMIT.index(emit), self._group_steps, self._prealloc,
            self._elastic is not None,
            *((self.curve.robust, self._elastic.memory, self._elastic.cold_start, self._elastic.probe_every,
               self._elastic.hysteresis) if self._elastic else (False, 1, 0, 0, 0.0)),
            *((True, float(self._focus.alpha), SCOPES.index(self._focus.scope), self._focus.sample_deviation,
               self._focus.exact_block) if self._focus else (False, 1.0, 0, False, False)),
        )  # fmt: skip
        self._requests = Requests(*(table[name] for name in Requests._fields))
        self._tally = Tally(
            np.zeros(8), np.zeros(9, np.int64), self.totals.step_latency.counts, self.totals.itl.counts,
            np.zeros(self._width + 1, np.int64),
        )  # fmt: skip
        self._no_steps = Steps(
            np.zeros((0, 2)), np.zeros((0, len(LEAP_COLUMNS)), np.int64), np.zeros(0, np.int32), np.zeros(0, np.uint8),
            np.zeros(0, np.int32), *(np.zeros((0, 1), np.uint64) for _ in range(3)),
        )  # fmt: skip

        self._waiting: deque[_Waiting] = deque()
        self._running: Ints = np.zeros(0, np.int32)  # slots, in order of admission; finished ones leave at once
        self._free_slots: list[int] = []
        self._group: Ints | None = None  # slots of a frozen batch, finished ones included
        self._loops_left = 0
        self._next: tuple[str, Ints] | None = None  # decided ahead
        self._preempted: list[int] = []
        self._freed: list[int] = []  # requests whose pages came free since the last plan
        self._plan: StepPlan | None = None
        self._seqs = sequences(0, self._width)
        self._grow(16)

    # ---- what drivers and routers ask ------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests admitted and not finished."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until a request arrives."""
        return not self._waiting and not len(self._running) and self._group is None and self._plan is None

    def submit(self, request: Request) -> bool:
        """Queue a request at its arrival; False, and counted as rejected, when it can never fit."""
        t, i = self.table, request.index
        t["replica"][i] = self.replica
        t["arrival"][i] = request.arrival
        t["input_length"][i] = request.input_length
        t["output_length"][i] = request.output_length
        self.submitted += 1
        if not self.fits(request):
            t["status"][i] = REJECTED
            return False
        self.outstanding_tokens += request.input_length + request.output_length
        self._waiting.append(_Waiting(request))
        return True

    def fits(self, request: Request) -> bool:
        """Whether a request could ever be served."""
        length = request.input_length + request.output_length
        return self._pages_for(self._canvas(length)) <= self.limits.num_pages and length <= self.limits.context_limit

    # ---- schedule --------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing waits and nothing runs.

        Raises RuntimeError if work waits that no step could ever serve: a fault of the engine, never a silent stall.
        """
        assert self._plan is None, "a step is still in flight"
        self._preempted = []
        if self._group is not None:
            group = self._group
            if self._ahead and self._loops_left == 1:
                self._next = self._decide(group)
            plan = self._plan_decode(now, group)
        else:
            action = self._next or self._decide()
            self._next = None
            if action is None:
                if self._waiting or len(self._running):
                    raise RuntimeError(f"idle with {len(self._waiting)} waiting and {len(self._running)} running")
                return None
            kind, slots = action
            if kind == "prefill":
                if self._ahead:
                    self._next = self._decide(slots, prefilling=True)
                plan = self._plan_prefill(now, slots)
            else:
                self._group = slots
                self._loops_left = self._group_steps
                if self._ahead and self._loops_left == 1:
                    self._next = self._decide(slots)
                plan = self._plan_decode(now, slots)
        self._plan = plan
        self.num_steps += 1
        return plan

    def _decide(self, in_flight: Ints | None = None, prefilling: bool = False) -> tuple[str, Ints] | None:
        """Prefill or decode, and which sequences; those `in_flight` are out of reach until their step ends."""
        ready = self._running
        if in_flight is not None:
            self._mark[in_flight] = True
            ready = ready[~self._mark[ready]]
            self._mark[in_flight] = False
        batching = self.policy.batching
        assert isinstance(batching, Continuous | BlockSynchronous)
        if batching.prefers_prefill(len(self._waiting), len(ready), self.limits.max_batch):
            admitted = self._admit()
            if len(admitted):
                return "prefill", admitted
        # LMDeploy prefetches a decode batch only if enough sequences are left outside the one in flight.
        if in_flight is not None and len(ready) <= (0 if prefilling else self.limits.max_batch // 4):
            return None
        ready = self._make_room(ready)
        return ("decode", ready) if len(ready) else None

    def _admit(self) -> Ints:
        """Slots of the waiting requests that the next prefill takes, first come first served."""
        budget = self._max_prefill
        slots: list[int] = []
        tokens = 0
        while self._waiting and len(self._running) + len(slots) < self.limits.max_batch:
            head = self._waiting[0]
            length, pages = self._pages_to_admit(head)
            if slots and tokens + length > budget:
                break
            if pages > self.limits.num_pages - self.pages_held:
                break
            self._waiting.popleft()
            slots.append(self._place(head, length, pages))
            tokens += length
        if not slots:
            return np.zeros(0, np.int32)
        admitted = np.array(slots, np.int32)
        self._running = np.concatenate([self._running, admitted])
        return admitted

    def _pages_to_admit(self, entry: _Waiting) -> tuple[int, int]:
        """Positions that a waiting request's prefill computes, and the pages it takes."""
        length = self._prefill_length(entry)
        canvas = self._canvas(entry.request.input_length + entry.request.output_length)
        return length, self._pages_for(min(length + self._prealloc, canvas))

    def _prefill_length(self, entry: _Waiting) -> int:
        """Positions that the prefill of a waiting request computes: a preempted one recomputes what it had."""
        if entry.slot >= 0:
            return int(self._seqs.start[entry.slot]) + self._block
        return self._canvas(max(1, entry.request.input_length))

    def _canvas(self, length: int) -> int:
        """A length rounded up to whole blocks."""
        return -(-length // self._block) * self._block

    def _place(self, entry: _Waiting, length: int, pages: int) -> int:
        """Give a waiting request a slot and its pages."""
        request = entry.request
        slot = entry.slot
        if slot < 0:
            if not self._free_slots:
                self._grow(2 * len(self._seqs.request))
            slot = self._free_slots.pop()
            self._seqs.request[slot] = request.index
            self._seqs.prompt[slot] = request.input_length
            self._seqs.end[slot] = request.input_length + request.output_length
            self._seqs.start[slot] = length - self._block
            self._seqs.status[slot] = MASKED
            self._seqs.status[slot, : request.input_length - (length - self._block)] = PENDING
            self._seqs.evaluations[slot] = 0
            self._seqs.emitted[slot] = 0
            self._seqs.seen_commit[slot] = False
            self._seqs.unpublished[slot] = True
            self._seqs.finished[slot] = False
            self._seqs.prefilled[slot] = False
            self._seqs.decoded[slot] = self._seqs.decode_steps[slot] = 0
            self._seqs.carried[slot] = False
            self._seqs.progress[slot] = -1
        self._seqs.pages[slot] = pages
        self.pages_held += pages
        return slot

    def _make_room(self, ready: Ints) -> Ints:
        """Grow the sequences' pages for the coming group, preempting the last ones until the rest fit."""
        while len(ready):
            need = self._pages_needed(ready)
            more = need - self._seqs.pages[ready]
            total = int(more.sum())
            if self.pages_held + total <= self.limits.num_pages:
                if total:
                    self._seqs.pages[ready] = need
                    self.pages_held += total
                return ready
            self._preempt(int(ready[-1]))
            ready = ready[:-1]
        return ready

    def _pages_needed(self, slots: Ints) -> Ints:
        """Pages that each sequence's tokens, and what the next group may add, take; never fewer than it holds."""
        # The canvas's end bounds what a group may reserve.
        limit = (self._seqs.end[slots] + (self._block - 1)) // self._block * self._block
        tokens = np.minimum(self._seqs.start[slots] + self._width + self._prealloc, limit)
        need: Ints = np.maximum((tokens + (self._page - 1)) // self._page, self._seqs.pages[slots])
        return need

    def _pages_for(self, length: int) -> int:
        return -(-length // self._page)

    def _preempt(self, slot: int) -> None:
        """Take a sequence's pages; it queues again, and recomputes its KV when its turn comes."""
        self.pages_held -= int(self._seqs.pages[slot])
        self._seqs.pages[slot] = 0
        status = self._seqs.status[slot]
        status[status == CACHED] = PENDING
        self._seqs.progress[slot] = -1
        self._running = self._running[self._running != slot]
        index = int(self._seqs.request[slot])
        t = self.table
        request = Request(
            index, float(t["arrival"][index]), int(t["input_length"][index]), int(t["output_length"][index])
        )
        # LMDeploy orders by the last update, so a preempted sequence goes behind those that wait.
        self._waiting.append(_Waiting(request, slot))
        self._preempted.append(index)
        self._freed.append(index)
        t["num_preemptions"][index] += 1
        self.totals.preemptions += 1

    def _plan_prefill(self, now: float, slots: Ints) -> StepPlan:
        block, width = self._block, self._width
        n = len(slots)
        status = self._seqs.status[slots]
        window = np.zeros((n, width), np.bool_)
        window[:, :block] = True
        length = self._seqs.start[slots].astype(np.int64) + block
        tokens = int(length.sum())
        # Block-causal: a query sees its own block and all before it (1.2).
        pairs = int((length * (length + block)).sum()) // 2
        # A prompt longer than a prefill may be is split, and runs alone (1.2).
        limit = self._max_prefill
        index = self._seqs.request[slots]
        fresh = index[np.isnan(self.table["scheduled"][index])]
        self.table["scheduled"][fresh] = now
        features = Features(
            tokens, pairs, tokens, n * block, n * block, n, tokens, max(1, -(-int(length.max()) // limit))
        )
        return self._new_plan(
            now, True, slots, np.full(n, Phase.PREFILL, np.uint8), length.astype(np.int32), length.astype(np.int32),
            window, status, 0, features,
        )  # fmt: skip

    def _plan_decode(self, now: float, slots: Ints) -> StepPlan:
        n = len(slots)
        finished = self._seqs.finished[slots]
        idle = finished.any()
        start = self._seqs.start[slots]
        status = self._seqs.status[slots]
        if self._ar:
            window = np.ones((n, 1), np.bool_)
            keys = start + 1
            num = np.ones(n, np.int32)
            phases = np.full(n, Phase.DENOISE, np.uint8)
            features = Features(n, int(keys.sum()), int(keys.sum()), n, n, n, 0)
            return self._new_plan(now, False, slots, phases, num, keys, window, status, 1, features)
        chunk = self._chunk
        if self._elastic is not None:
            chunk = self._chunk = self._choose(n)
        if self._rule == BLOCK_PASS:
            window = np.ones((n, self._width), np.bool_)
            num = np.full(n, self._block, np.int32)
            beyond = num
            pairs_beyond = num.astype(np.int64) * self._block
        else:
            reach = np.full(n, self._width, np.int32)
            if self.policy.obs:
                reach[start + self._block >= self._seqs.end[slots]] = self._block
            window = self._rules.select_window(status, reach, chunk, self._pending_first)
            if self._focus is not None and self._focus.exact_block:
                window[~(status == MASKED).any(axis=1)] = True
            num, beyond, pairs_beyond = self._rules.visible_keys(status, window, self._block, self._listed)
        keys = start + beyond
        masked = (window & (status == MASKED)).any(axis=1)
        phases = np.where(masked, np.uint8(Phase.DENOISE), np.uint8(Phase.FLUSH))
        if idle:
            phases[finished] = Phase.IDLE
            window = window.copy()
            window[finished] = False
        tokens = int(num.sum())
        pairs = int((num.astype(np.int64) * start).sum() + pairs_beyond.sum())
        sampled = n * self._block if self._sample_block else tokens
        features = Features(tokens, pairs, int(keys.sum()), tokens, sampled, n, 0)
        evicting = None if self._focus is None else self._evicting(self._focus, slots, window & (status == MASKED))
        return self._new_plan(now, False, slots, phases, num, keys, window, status, chunk, features, evicting)

    def _evicting(self, rule: Focus, slots: Ints, masked: npt.NDArray[np.bool_]) -> Evicting | None:
        """What a step may evict; None where no sequence has more masks than its budget."""
        q = self._seqs
        num_masked, decoded, steps = masked.sum(axis=1), q.decoded[slots], q.decode_steps[slots]
        if not (num_masked > budget(num_masked, decoded, steps, rule.alpha)).any():
            return None
        return Evicting(rule, decoded, steps, q.progress[slots])

    def _choose(self, batch: int) -> int:
        assert self._elastic is not None
        latency = self._latency_by_chunk(batch)
        return choose_chunk(self._elastic, self.curve, self._chunks, latency, self._chunk, self.totals.num_decode_steps)

    def _latency_by_chunk(self, batch: int) -> npt.NDArray[np.float64]:
        """T(c, b) of every candidate chunk."""
        assert self._latency is not None
        latency = self._latencies.get(batch)
        if latency is None:
            latency = self._latencies[batch] = self._latency.of_tokens(self._chunks * batch, batch)
        return latency

    def _new_plan(
        self, now: float, prefill: bool, slots: Ints, phases: npt.NDArray[np.uint8], num: Ints, keys: Ints,
        window: npt.NDArray[np.bool_], status: npt.NDArray[np.uint8], chunk: int, features: Features,
        evicting: Evicting | None = None,
    ) -> StepPlan:  # fmt: skip
        q = self._seqs
        freed, self._freed = tuple(self._freed), []
        return StepPlan(
            now, self.num_steps, prefill, q.request[slots], phases, num, keys, window, status,
            q.evaluations[slots], q.start[slots], q.prompt[slots], q.end[slots], chunk, features, slots,
            len(self._waiting), len(self._running), self.pages_held, self.submitted, tuple(self._preempted), freed,
            evicting,
        )  # fmt: skip

    # ---- leap ------------------------------------------------------------------------------------------------

    def leap(
        self,
        now: float,
        horizon: float,
        cost: Cost,
        draws: Draws,
        recorder: StepRecorder | None = None,
        watched: bool = True,
    ) -> tuple[float, Ints]:
        """Run predicted decode steps from `now` while nothing is to be decided, up to the next arrival at `horizon`.

        watched: someone may look at the engine at the horizon, so that no step may be in flight then.
        Returns the time reached and the requests that finished with the last step. The same, bit for bit, as one
        `schedule`, step model and `commit` after another, which is what remains to be done where it stops.
        """
        tally, totals = self._tally, self.totals
        slots = self._running if self._group is None else self._group
        nothing = slots[:0]
        if not self._leaps or not len(slots) or self._next is not None:
            return now, nothing
        can_admit = self._can_admit()
        if self._group is None and can_admit:
            return now, nothing
        # Beyond a group's end lies a decision, which is known only when no one waits to be let in. LMDeploy takes it
        # as the last step begins, with the sequences outside the group alone.
        most = MANY
        cross = not self._waiting or (not self._ahead and not can_admit)
        if self._ahead:
            cross = cross and len(self._running) == len(slots) - int(self._seqs.finished[slots].sum())
            if not cross:
                most = (self._loops_left if self._group is not None else self._group_steps) - 1
        steps = self._no_steps if recorder is None else recorder.room(len(slots))
        curve, chunks, latencies = _NO_CURVE, _NO_CHUNKS, _NO_CURVE
        observed = 0
        if self._elastic is not None:
            curve, chunks, latencies = self.curve.curve, self._chunks, self._latency_by_chunk(len(slots))
            observed = self.curve.observed
        step, itl = totals.step_latency, totals.itl
        tally.times[:] = (
            totals.decode_time, totals.page_time, step.sum, step.min, step.max, itl.sum, itl.min, itl.max
        )  # fmt: skip
        tally.numbers[:] = (
            0, 0, 0, 0, self.pages_held, self.outstanding_tokens, observed, totals.num_decode_steps, 0
        )  # fmt: skip
        tally.chunks[:] = 0
        chunk = 1 if self._ar else self._chunk
        loops_left = 0 if self._group is None else self._loops_left
        end, chunk, num_steps, num_done, loops_left = leap(
            now, horizon, slots, chunk, self._seqs, self._requests, draws, self._setting, cost, tally, curve,
            chunks, latencies, steps, recorder is not None, loops_left, most, cross,
            watched,
        )  # fmt: skip
        tokens, committed, _, gaps, self.pages_held, self.outstanding_tokens, observed, _, evicted = (
            tally.numbers.tolist()
        )
        if not num_steps:
            return now, nothing
        n = len(slots)
        totals.decode_time, totals.page_time, step.sum, step.min, step.max, itl.sum, itl.min, itl.max = (
            tally.times.tolist()
        )
        step.count += num_steps
        itl.count += gaps
        for c in np.flatnonzero(tally.chunks).tolist():
            totals.chunk.add(c, int(tally.chunks[c]))
        totals.batch.add(n, num_steps)
        totals.num_decode_steps += num_steps
        totals.tokens += tokens
        totals.evicted += evicted
        totals.committed += committed
        totals.forwards += n * num_steps
        totals.max_waiting = max(totals.max_waiting, len(self._waiting))
        if self._elastic is not None:
            self.curve.observed = observed
            self._chunk = chunk
        if recorder is not None:
            recorder.leapt(
                steps, num_steps, n, self.replica, self.num_steps, len(self._waiting), len(self._running),
                self.submitted, num_done,
            )  # fmt: skip
        self.num_steps += num_steps
        self._group, self._loops_left = (slots, loops_left) if loops_left else (None, 0)
        done = nothing
        if num_done:
            over = self._seqs.finished[self._running]
            done = self._running[over]
            self._running = self._running[~over]
        if self._group is None:
            self._release(slots[self._seqs.finished[slots]])
        return end, self._seqs.request[done]

    def _can_admit(self) -> bool:
        """Whether the next decision could be a prefill."""
        batching = self.policy.batching
        assert isinstance(batching, Continuous | BlockSynchronous)
        if not self._waiting or len(self._running) >= self.limits.max_batch:
            return False
        if not batching.prefers_prefill(len(self._waiting), len(self._running), self.limits.max_batch):
            return False
        return self._pages_to_admit(self._waiting[0])[1] <= self.limits.num_pages - self.pages_held

    # ---- commit ----------------------------------------------------------------------------------------------

    def commit(self, outcome: StepOutcome, now: float) -> Ints:
        """Take in what came of the step in flight; returns the indices of the requests that finished with it."""
        plan = self._plan
        assert plan is not None, "no step is in flight"
        self._plan = None
        slots, committed = plan.slots, outcome.committed
        assert committed.shape == plan.window.shape, f"{committed.shape} commits for a window of {plan.window.shape}"
        assert self._ar or not (committed & ~(plan.window & (plan.status == MASKED))).any(), (
            "only computed masks commit"
        )
        retained = outcome.retained
        assert retained is None or plan.evicting is not None, "the plan evicts nothing"
        if retained is not None:
            assert not (retained & ~plan.window).any(), "only computed positions are retained"
            assert not (plan.window & (plan.status != MASKED) & ~retained).any(), "only masks are evicted"
            assert not (committed & ~retained).any(), "only retained masks commit"
        self._account(plan, outcome)
        self._first_commits(slots, committed, now)
        done = self._commit_tokens(plan, now) if self._ar else self._commit_blocks(plan, outcome, now)
        if plan.prefill:
            first = ~self._seqs.prefilled[slots]
            self._seqs.prefilled[slots] = True
            self.outstanding_tokens -= int(plan.prompt[first].sum())
            self._release(done)
        else:
            self._loops_left -= 1
            # A round of blocks ends with the forward that every block entered complete (2.3).
            over = self._loops_left == 0 if not self._synchronous else not (plan.phases == Phase.DENOISE).any()
            if over:
                self._group = None
                self._release(slots[self._seqs.finished[slots]])
        if len(done):
            self._running = self._running[~self._seqs.finished[self._running]]
        indices: Ints = self._seqs.request[done]
        return indices

    def _release(self, slots: Ints) -> None:
        """Give back the pages and slots of finished sequences."""
        if len(slots):
            self.pages_held -= int(self._seqs.pages[slots].sum())
            self._seqs.pages[slots] = 0
            self._free_slots.extend(int(s) for s in slots)
            self._freed.extend(int(i) for i in self._seqs.request[slots])

    def _account(self, plan: StepPlan, outcome: StepOutcome) -> None:
        totals, latency = self.totals, outcome.latency
        totals.page_time += plan.pages * latency
        if outcome.device == outcome.device:  # not NaN: someone measured it
            totals.host.add(max(0.0, latency - outcome.device))
        totals.max_waiting = max(totals.max_waiting, plan.waiting)
        t = self.table
        num = outcome.committed.sum(axis=1)
        t["num_committed"][plan.requests] += num.astype(np.int32)
        if plan.prefill:
            totals.num_prefill_steps += 1
            totals.prefill_time += latency
            totals.prefill_tokens += plan.features.tokens
            return
        n = len(plan.slots)
        totals.num_decode_steps += 1
        totals.decode_time += latency
        totals.step_latency.add(latency)
        totals.batch.add(n)
        totals.chunk.add(plan.chunk)
        totals.tokens += plan.features.tokens
        computed = plan.num_tokens
        if outcome.retained is not None:
            computed = outcome.retained.sum(axis=1, dtype=np.int32)
            totals.evicted += plan.features.tokens - int(computed.sum())
        totals.committed += int(num.sum())
        totals.forwards += n
        t["num_forwards"][plan.requests] += 1
        t["num_computed"][plan.requests] += computed

    def _first_commits(self, slots: Ints, committed: npt.NDArray[np.bool_], now: float) -> None:
        unseen = ~self._seqs.seen_commit[slots]
        if unseen.any():
            first = slots[unseen & committed.any(axis=1)]
            self._seqs.seen_commit[first] = True
            self.table["first_commit"][self._seqs.request[first]] = now

    def _commit_tokens(self, plan: StepPlan, now: float) -> Ints:
        """Autoregressive: every row has one token more."""
        slots = plan.slots
        self._seqs.start[slots] += 1
        if plan.prefill:
            slots = slots[plan.end > plan.prompt]
            index = self._seqs.request[slots]
            self.table["first_block"][index[np.isnan(self.table["first_block"][index])]] = now
        if self.emit != "end":
            self._emit(slots, np.ones(len(slots), np.int32), now)
        done: Ints = plan.slots[self._seqs.start[plan.slots] + 1 >= plan.end]
        self._finish(done, now)
        return done

    def _commit_blocks(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Ints:
        slots: Ints = plan.slots
        block, committed = self._block, outcome.committed
        if self._focus is not None and not plan.prefill:
            self._learn_yield(slots, plan.window if outcome.retained is None else outcome.retained, committed)
        if self._elastic is not None:
            self._learn(plan, committed)
        masks_left, open_left = self._rules.apply(
            self._seqs.status, self._seqs.evaluations, slots, plan.window, committed, block,
            self._prefill_rule if plan.prefill else self._rule,
        )  # fmt: skip
        if self._synchronous and (plan.phases == Phase.DENOISE).any():
            return slots[:0]  # the round goes on until every block was complete on entry
        if self.emit == "step":
            self._emit_prefixes(slots, now)
        done = slots[:0]
        if plan.prefill:  # a request for no tokens is over once its prompt is in
            done = slots[plan.end == plan.prompt]
            self._finish(done, now)
        while True:
            complete = slots[(masks_left == 0) & self._seqs.unpublished[slots] & ~self._seqs.finished[slots]]
            if len(complete):
                done = np.concatenate([done, self._publish(complete, now)])
            if self._width > block:
                done = np.concatenate([done, self._publish_last(slots, now)])
            over = slots[(open_left == 0) & ~self._seqs.finished[slots]]
            if not len(over):
                return done
            self._advance(over)
            if self._width == block:
                return done
            # Streaming has already worked on the next block: it may be complete too.
            masks_left = (self._seqs.status[slots, :block] == MASKED).sum(axis=1)
            open_left = (self._seqs.status[slots, :block] != CACHED).sum(axis=1)

    def _learn(self, plan: StepPlan, committed: npt.NDArray[np.bool_]) -> None:
        """Show the commit curve a step; a prefill's block counts as computed at the largest chunk (6.4 h)."""
        counts, sums = self._prefix
        counts[:] = 0
        sums[:] = 0
        self._rules.count_prefixes(plan.status, plan.window, committed, not self.curve.robust, counts, sums)
        self.curve.observe(counts, sums)

    def _learn_yield(self, slots: Ints, retained: npt.NDArray[np.bool_], committed: npt.NDArray[np.bool_]) -> None:
        """Bring what FOCUS goes by up to date: steps that decode nothing do not count (focus.md 3.1)."""
        q = self._seqs
        last = retained.shape[1] - 1 - np.argmax(retained[:, ::-1], axis=1)
        q.progress[slots] = np.maximum(q.progress[slots], np.where(retained.any(axis=1), last, -1))
        num = committed.sum(axis=1)
        some = slots[num > 0]
        anew = some[q.carried[some]]
        q.decoded[anew] = q.decode_steps[anew] = 0
        q.carried[anew] = False
        q.decoded[some] += num[num > 0].astype(np.int32)
        q.decode_steps[some] += 1

    def _publish(self, slots: Ints, now: float) -> Ints:
        """Hand out the tokens of blocks just completed; returns the slots whose request is done."""
        self._seqs.unpublished[slots] = False
        index = self._seqs.request[slots]
        stop = np.minimum(self._seqs.end[slots], self._seqs.start[slots] + self._block)
        tokens = stop - self._seqs.prompt[slots] - self._seqs.emitted[slots]
        if self.emit != "end":
            some = tokens > 0
            self._emit(slots[some], tokens[some], now)
        first = np.isnan(self.table["first_block"][index]) & (stop > self._seqs.prompt[slots])
        self.table["first_block"][index[first]] = now
        done: Ints = slots[stop >= self._seqs.end[slots]]
        self._finish(done, now)
        return done

    def _publish_last(self, slots: Ints, now: float) -> Ints:
        """End the requests that streaming has decoded to the end of the next, last block: they need no flush."""
        q, block = self._seqs, self._block
        last = q.start[slots] + 2 * block >= q.end[slots]
        complete = ~(q.status[slots] == MASKED).any(axis=1)
        done: Ints = slots[last & complete & ~q.unpublished[slots] & ~q.finished[slots]]
        tokens = q.end[done] - q.prompt[done] - q.emitted[done]
        if self.emit != "end":
            self._emit(done, tokens, now)
        self._finish(done, now)
        return done

    def _emit_prefixes(self, slots: Ints, now: float) -> None:
        """Emit what each block's contiguous committed prefix has gained."""
        masked = self._seqs.status[slots, : self._block] == MASKED
        prefix = np.where(masked.any(axis=1), np.argmax(masked, axis=1), self._block)
        stop = np.minimum(self._seqs.end[slots], self._seqs.start[slots] + prefix)
        tokens = stop - self._seqs.prompt[slots] - self._seqs.emitted[slots]
        some = (tokens > 0) & ~self._seqs.finished[slots]
        self._emit(slots[some], tokens[some], now)

    def _emit(self, slots: Ints, tokens: npt.NDArray[Any], now: float) -> None:
        """`tokens` more reach each client."""
        t, index = self.table, self._seqs.request[slots]
        last = t["last_emission"][index]
        first = np.isnan(last)
        if first.any():
            t["first_emission"][index[first]] = now
            t["num_first"][index[first]] = tokens[first]
            last = last[~first]
        self.totals.itl.add_many(now - last)
        t["last_emission"][index] = now
        t["num_emissions"][index] += 1
        t["num_tokens"][index] += tokens.astype(np.int32)
        self._seqs.emitted[slots] += tokens.astype(np.int32)
        self.outstanding_tokens -= int(tokens.sum())

    def _finish(self, slots: Ints, now: float) -> None:
        if not len(slots):
            return
        if self.emit == "end":
            some = slots[self._seqs.end[slots] > self._seqs.prompt[slots]]
            self._emit(some, self._seqs.end[some] - self._seqs.prompt[some], now)
        self._seqs.finished[slots] = True
        index = self._seqs.request[slots]
        self.table["finish"][index] = now
        self.table["status"][index] = COMPLETED

    def _advance(self, slots: Ints) -> None:
        """Close blocks whose KV is right, and open the next."""
        block = self._block
        self._seqs.start[slots] += block
        self._seqs.status[slots, : self._width - block] = self._seqs.status[slots, block:]
        self._seqs.status[slots, self._width - block :] = MASKED
        self._seqs.evaluations[slots, : self._width - block] = self._seqs.evaluations[slots, block:]
        self._seqs.evaluations[slots, self._width - block :] = 0
        self._seqs.unpublished[slots] = True
        self._seqs.progress[slots] = -1
        if self._focus is not None and self._focus.scope == "block":
            self._seqs.decoded[slots] = self._seqs.decode_steps[slots] = 0
        elif self._focus is not None:
            self._seqs.carried[slots] = self._focus.scope == "carry"

    def _grow(self, capacity: int) -> None:
        """Make room for `capacity` sequences."""
        old = len(self._seqs.request)
        self._seqs = sequences(capacity, self._width, self._seqs)
        self._mark = np.zeros(capacity, np.bool_)  # scratch
        # The lowest free slot is taken first.
        self._free_slots = [*range(capacity - 1, old - 1, -1), *self._free_slots]


def _cache_rules(policy: Policy) -> tuple[int, int, bool]:
    """The caching rule of decode steps, that of prefill, and whether queries see listed keys only."""
    eviction = policy.eviction
    if not isinstance(eviction, DelayedCache):
        return BLOCK_PASS, BLOCK_PASS, False
    rule = NEIGHBOUR if eviction.neighbour_aware else DELAYED
    return rule, rule if eviction.prefill_counts else BLOCK_PASS, eviction.visible == "listed"
