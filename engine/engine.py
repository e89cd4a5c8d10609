"""The serving engine, without clock or device: decides what runs next and tracks sequences."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import core
from .admission import withdraw
from .discipline import EMPTY_STEP, HELD, MOST_WITHHELD, Caps, ask, ask_from
from .errors import DsimError, PolicyError, cut
from .histogram import NO_COUNTS, CountHistogram, TimeHistogram
from .jit import plain
from .journal import NO_JOURNAL, RequestTable, StepRecorder, StepTotals
from .latency import Continued, Features, LatencyModel
from .part import Policy, Rows, numbers_of
from .prefix import Prefixes
from .records import table as rows_of
from .request import Request
from .state import (
    ASK_AGAIN,
    BATCHES,
    CACHED,
    CANCELLED,
    CHUNKS,
    DECODE_STEP,
    DONE,
    FREED,
    GAP_BINS,
    MASKED,
    NOTHING,
    PREEMPTED,
    PREFILL_STEP,
    REJECTED,
    REPLICA,
    ROWS,
    RUNNING,
    STEP_BINS,
    UNFINISHED,
    AnyPolicy,
    Cost,
    Draws,
    Inbox,
    Masks,
    PolicyState,
    Replica,
    as_tables,
    new_replica,
    read_only,
    with_queue,
    with_slots,
)
from .step import StepOutcome, StepPlan
from .unmasking import EOS, array_of, unmask_drawn
from .view import View, class_of, requests_at, view_in_python
from .window_pages import have_room, in_sight, most_in_sight

EMIT = ("block", "step", "end")
STEPS_A_CALL = 4096  # compiled; between calls a run can be stopped

Ints = npt.NDArray[np.int32]
_most_in_sight, _have_room, _in_sight = plain(most_in_sight), plain(have_room), plain(in_sight)
_opened, _opened_policy = plain(core.opened), plain(core.opened_policy)
# Steps in a row without a commit that end a run; above MOST_STEPS and MAX_LOOPS.
MOST_FRUITLESS = 1000
_FREE = LatencyModel(((0.0, 0.0),), 0.0)
NO_ENTRIES: npt.NDArray[np.int64] = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Limits:
    num_pages: int  # of KV, in the pool
    context_limit: int  # tokens of prompt and output
    max_batch: int  # running sequences
    max_prefill_tokens: int | None = None  # of one prefill; None: the policy's
    state_tokens: int = 1  # a token's attention and feed-forward outputs, in tokens of KV
    window: int = 0  # tokens that keep pages in layers with a window (window_pages.py); 0: none
    window_bytes: int = 0  # a token's KV in those layers
    kv_bytes: int = 1  # ... and in all others


def _counter(name: str) -> Any:
    """A whole number of state.Counters as a property."""
    return property(lambda engine: int(engine._counters[name]))


class Engine:
    """One replica's scheduler and its sequences' state.

        plan = engine.schedule(now); outcome = <step model or GPU>(plan); engine.commit(outcome, now)

    `run` takes many predicted steps a call. table: receives requests' outcomes. latency: for policies that choose by
    T(c, b). eos: answers end at an EOS, unforeseen. prefixes: for policies that reuse pages. like: a replica with the
    same policy, limits and latency, to share constants.
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
        eos: bool = False,
        prefixes: Prefixes | None = None,
        like: "Engine | None" = None,
    ) -> None:
        if emit not in EMIT:
            raise DsimError(f"emit is {emit!r}, expected one of {', '.join(EMIT)}")
        if policy.granularity.needs_latency and latency is None:
            raise PolicyError(f"policy {policy.name} chooses by T(c, b), expected a latency model")
        self.policy = policy
        self.limits = limits
        self.table = table
        self.replica = replica
        self.num_pages, self.page_size = limits.num_pages, policy.memory.page_size
        self.emit = emit
        self._given_threshold = policy.unmasking.given
        self.caps = Caps(policy.batching.hides_host)
        self.asks_python = policy.granularity.given or self._given_threshold or policy.unmasking.chooses
        self._prefixes = prefixes
        assert not (limits.window and policy.memory.shares_pages), "shared pages are of all layers"
        num_pages, window_pool = limits.num_pages, 0
        if limits.window:
            num_pages, window_pool = policy.memory.pools(num_pages, limits.window_bytes, limits.kv_bytes)
        values = {
            "block": policy.block_length,
            "width": policy.width,
            "page": policy.memory.page_size,
            "num_pages": num_pages,
            "max_batch": limits.max_batch,
            "max_prefill": limits.max_prefill_tokens or policy.batching.max_prefill_tokens,
            "emit": EMIT.index(emit),
            "state_tokens": limits.state_tokens,
            "replica": replica,
            "eos": eos,
            "window": (latency or _FREE).window,
            "keeps": limits.window,
            "window_bytes": limits.window_bytes,
            "kv_bytes": limits.kv_bytes,
            "window_pool": window_pool,
            "stops": EOS.index(policy.unmasking.eos),
            "num_thresholds": len(policy.unmasking.thresholds),
            "context_limit": limits.context_limit,
            "most_fruitless": MOST_FRUITLESS,
        }
        fixed = np.zeros(1, REPLICA)
        for name, value in values.items():
            fixed[name] = value
        self._arrays: Any = new_replica(fixed, table.rows, table.asked, table.arrival)
        self.counters["ask_from"] = ask_from(policy.discipline)
        self._moved: Callable[[tuple[Any, Any]], None] = lambda state: None
        self._shares_bins = False
        thresholds = [np.nan]
        if policy.unmasking.varies:
            thresholds = list(policy.unmasking.thresholds)
        self._own: Any = PolicyState(
            fields=like._own.fields if like else numbers_of(policy),
            columns=self._columns(0),
            record=record_of(policy),
            cost=like._own.cost if like else (latency or _FREE).arrays(),
            cache=policy.memory.cache(limits.num_pages, prefixes),
            thresholds=np.array(thresholds),
        )
        self.core: core.Core = like.core if like else core.core_of(policy, self._own)
        self._run: tuple[Draws, Cost, Any] | None = None  # of `_entry`, with its arguments
        self._host = TimeHistogram(NO_COUNTS)  # latency minus device time, where measured
        self._absent_pages = 0  # held for requests that left or are expected
        self.blocked = False  # requests wait for such pages, and nothing runs until then
        self._withheld: tuple[float, int] | None = None  # since when the discipline lets nothing run (s); steps by then
        self._grow(16)

    # ---- for drivers and routers -----------------------------------------------------------------------------

    num_waiting: int = _counter("num_waiting")  # queued requests
    num_running: int = _counter("num_running")
    expected_tokens: int = _counter("expected_tokens")  # to prefill or return, by estimated lengths, for routers
    pages_held: int = _counter("pages_held")
    submitted: int = _counter("submitted")  # requests, rejected ones included
    num_steps: int = _counter("num_steps")
    num_completed: int = _counter("completed")

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens of queued requests; those with KV from a link excluded."""
        requests = self._arrays.queue[self._places(), 0]
        return int(self._arrays.asked.input_length[requests].sum() - self._arrays.requests["arrived"][requests].sum())

    @property
    def counters(self) -> npt.NDArray[Any]:
        """state.Counters [1], read-only."""
        counters: Any = self._arrays.counters
        return counters

    @property
    def clock(self) -> float:
        """Time reached by `run` (s)."""
        return float(self._counters["clock"])

    @property
    def idle(self) -> bool:
        """Nothing to do until a request arrives."""
        counters = self._counters
        return bool(
            counters["kind"] == NOTHING
            and not counters["num_waiting"]
            and not counters["num_running"]
            and counters["num_group"] < 0
            and counters["next_kind"] == NOTHING
            and counters["entered"] == len(self._arrays.inbox.requests)
        )

    @property
    def totals(self) -> StepTotals:
        """Totals of all steps, without bins shared by replicas (`join`)."""
        counters, arrays = self._counters, self._arrays
        bins = arrays.bins
        if self._shares_bins:
            bins = [NO_COUNTS, NO_COUNTS]
        same = ["num_decode_steps", "num_prefill_steps", "prefill_time", "decode_time"]
        same += ["forwards", "preemptions", "page_time", "max_waiting", "end"]
        return StepTotals(
            step_latency=_times(bins[STEP_BINS], counters, "step"),
            itl=_times(bins[GAP_BINS], counters, "gap"),
            host=self._host,
            batch=_counts(arrays.counts[BATCHES]),
            chunk=_counts(arrays.counts[CHUNKS]),
            tokens=int(counters["total_tokens"]),
            evicted=int(counters["total_evicted"]),
            committed=int(counters["total_committed"]),
            prefill_tokens=int(counters["total_prefill_tokens"]),
            num_pages=self.limits.num_pages,
            **self._reuse(),
            **{name: counters[name].item() for name in same},
        )

    def _reuse(self) -> dict[str, int]:
        if not self._own.cache:
            return {}
        pool = self._own.cache.pool
        return {"prefix_queries": int(pool["queries"][0]), "prefix_hits": int(pool["hits"][0])}

    def submit(self, request: Request) -> bool:
        """Queue an arriving request; False if it is rejected, as it can never fit."""
        i, counters = request.index, self._counters
        self.table.enter(request, self.replica)
        row = rows_of(self.table.rows)[i]
        row.limited = request.max_tokens > 0
        row.priority = request.priority
        row.arrived = request.arrived
        if request.deadline < math.inf:
            row.deadline = request.deadline
        if request.arrived:
            self._absent_pages -= int(row.reserved)
        if request.slo_class:
            row.slo_class = class_of(request.slo_class)
        counters["submitted"] += 1
        if not self.fits(request):
            row.status = REJECTED
            return False
        cache, prefixes = self._own.cache, self._prefixes
        if cache and prefixes is not None and cache.names is not prefixes.names:  # the table of names has grown
            self._own = self._own._replace(cache=cache._replace(names=prefixes.names))
            self._set(self._arrays)
        waiting = int(counters["num_waiting"])
        # Always room for all running requests, which may be preempted.
        if waiting + len(self._arrays.sequences) + 1 > len(self._arrays.queue):
            self._make_queue()
        queue = self._arrays.queue
        end = (int(counters["queue_head"]) + waiting) % len(queue)
        queue[end, 0], queue[end, 1] = i, -1
        counters["num_waiting"] = waiting + 1
        counters["expected_tokens"] += request.input_length + request.expected
        return True

    # ---- requests that move between replicas: their KV arrives before them or leaves after them ----------------

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.policy.memory.page_size) + int(_in_sight(self._fixed, tokens, tokens))

    @property
    def free_pages(self) -> int:
        return int(self._fixed.num_pages) - self.pages_held

    def take_done(self) -> list[int]:
        """Requests that the last step ended; reading clears them."""
        done: list[int] = self._arrays.lists[DONE, : int(self._counters["num_done"])].tolist()
        self._counters["num_done"] = 0
        return done

    def keep(self, pages: int) -> None:
        """Hold a departed request's pages until its KV is sent; negative: release them."""
        self._counters["pages_held"] += pages
        self._absent_pages += pages

    def reserve(self, request: int, prompt: int, tokens: int, spare: int | None = None) -> bool:
        """Hold pages for a request that will arrive with KV of its first `tokens`; `submit` takes them.

        Prefix-cached pages (`found`) are shared. spare: pages that must stay free; else returns False, holding nothing.
        """
        pages, cached, entries = self.pages_of(tokens), 0, NO_ENTRIES
        if self._own.cache:
            cached, entries = self._find_ahead(request, prompt, tokens)
        shared = 0
        if len(entries):
            shared = int((self._own.cache.entries["refs"][entries] > 0).sum())
        if spare is not None and pages - shared + spare > self.free_pages:
            return False
        self.keep(pages - len(entries))
        self._absent_pages += len(entries)
        if self._own.cache:
            self.call_cache("pin", entries)
        self.table.rows["reserved"][request], self.table.rows["found"][request] = pages, cached
        return True

    def found(self, request: int, prompt: int, tokens: int) -> int:
        """Prefix-cached tokens among a prompt's first `tokens`."""
        if not self._own.cache:
            return 0
        return self._find_ahead(request, prompt, tokens)[0]

    def _find_ahead(self, request: int, prompt: int, tokens: int) -> tuple[int, npt.NDArray[np.int64]]:
        """`prefix.find_ahead`, limited to what the policy would reuse."""
        entries = np.full(self.pages_of(tokens), -1, np.int64)
        limit = min(tokens, self.policy.batching.most_reused(self.policy, prompt))
        reused = self.call_cache("find_ahead", request, limit, entries)
        return int(reused), entries[entries >= 0]

    def call_cache(self, name: str, *arguments: Any) -> Any:
        """Call a prefix cache's rule (core._OF_CACHE)."""
        return self.core.of_cache(name, len(self.table.rows))(*self.state, *arguments)

    def expect(self, inbox: Inbox) -> None:
        """Have `run`, not the driver, submit these requests of the table at their times.

        Not for policies that ask Python while planning.
        """
        assert not self.asks_python, "its steps are not compiled"
        self._arrays = self._arrays._replace(inbox=Inbox(*(read_only(column) for column in inbox)))
        self._grow(len(self._arrays.sequences))

    def cancel(self, request: int, now: float) -> bool:
        """Drop a request between steps; False if it has ended or is another engine's.

        Frees its pages at once; its row at the next step, or the one after if that is decided.
        """
        assert self._counters["kind"] == NOTHING, "a step is in flight"
        t = self.table
        if t["status"][request] != UNFINISHED or t["replica"][request] != self.replica:
            return False
        idles = self.policy.batching.idles_finished
        if not withdraw(self._arrays, request, idles, lambda slot: self.core.let_go(*self.state, slot)):
            return False
        t["status"][request] = CANCELLED
        t["finish"][request] = now
        return True

    def fits(self, request: Request) -> bool:
        """Whether the request could ever be served."""
        policy = self.policy
        length = policy.batching.length(policy, request.input_length, request.limit)
        if length > self.limits.context_limit or not policy.batching.fits(policy, length):
            return False
        return bool(_have_room(self._fixed, *self.most_pages(request)))

    def most_pages(self, request: Request) -> tuple[int, int]:
        """Most pages of a request, in layers without and with a window."""
        policy, prompt, page = self.policy, request.input_length, self.policy.memory.page_size
        tokens = int(policy.batching.reserved(policy, prompt, request.limit, self.limits.state_tokens))
        at_once = policy.batching.at_once(policy, prompt, request.limit)
        return -(-tokens // page), int(_most_in_sight(self._fixed, tokens, at_once))

    @property
    def _fixed(self) -> Any:
        return self.state[0].fixed[0]

    # ---- step by step ----------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step; None if nothing waits or runs.

        PolicyError if waiting requests will never be served.
        """
        assert self._counters["kind"] == NOTHING, "a step is still in flight"
        self._make_slots()
        if self._schedule(now) == NOTHING:
            if not self.withheld:
                self._check_idle()
            return None
        if self.policy.unmasking.varies and not self._given_threshold:
            self._counters["threshold"] = int(self.core.choose_threshold(*self.state))
        return self._plan()

    @property
    def withheld(self) -> bool:
        """Whether requests wait and the discipline, asked again a moment later, may let one run."""
        return self._withheld is not None

    def _schedule(self, now: float) -> int:
        kind = self._choose_and_plan(now)
        self._note_withheld(kind == NOTHING)
        if kind != NOTHING and self._given_threshold:
            self._counters["threshold"] = self._threshold_now()
        return kind

    def _choose_and_plan(self, now: float) -> int:
        core = self.core
        self._counters["clock"] = float(now)
        kind = ASK_AGAIN
        while kind == ASK_AGAIN:
            self._ask()
            if self.policy.granularity.given:
                kind = int(core.choose_rows(*self.state))
            else:
                kind = int(core.schedule(*self.state, float(now)))
        if not self.policy.granularity.given:
            return kind
        if kind == DECODE_STEP:
            self._select_rows()
        if kind != NOTHING:
            core.plan(*self.state, kind, float(now))
        return kind

    def _view(self) -> View:
        """What the policy sees in plain Python."""
        replica, policy = self.state
        return view_in_python(_opened(replica), _opened_policy(policy))

    def _threshold_now(self) -> int:
        rule = self.policy.unmasking
        threshold = rule.threshold_now(self._view())
        if not isinstance(threshold, float | int) or threshold not in rule.thresholds:
            source = f"policy {self.policy.name}: {type(rule).__name__}.threshold_now"
            raise PolicyError(f"{source} returned {cut(threshold)}, expected one of {rule.thresholds}")
        return list(rule.thresholds).index(threshold)

    def _places(self) -> npt.NDArray[np.int64]:
        """Waiting requests' positions in the queue's ring, in order."""
        n, head = int(self._counters["num_waiting"]), int(self._counters["queue_head"])
        places: npt.NDArray[np.int64] = (head + np.arange(n)) % len(self._arrays.queue)
        return places

    def _ask(self) -> None:
        """Ask the discipline about the coming decision, if its answers matter."""
        if self.num_waiting < self._counters["ask_from"]:
            return
        arrays, places, policy = self._arrays, self._places(), self.policy
        running = arrays.lists[RUNNING, : self.num_running]
        answers = ask(policy, self._view()._replace(num_rows=0))
        if answers.holds is not None:
            arrays.queue[places, HELD] = answers.holds
        if answers.rests is not None:
            self._own.columns["rests"][running] = answers.rests
        for name in ("most_admitted", "most_prompt_tokens"):
            if (allowed := getattr(answers, name)) is not None:
                self._own.record[name] = allowed
        self.caps.decided(answers, arrays.queue[places, 0], arrays.sequences["request"][running])
        if answers.order is not None:
            arrays.queue[places] = arrays.queue[places[answers.order]]

    def _select_rows(self) -> None:
        counters, arrays, policy = self._counters, self._arrays, self.policy
        slots = arrays.lists[ROWS, : int(counters["num_rows"])]
        rows = arrays.sequences[slots]
        blocks = np.maximum(1, -(-(rows["end"] - rows["start"]) // policy.block_length))
        reach = np.minimum(policy.width, blocks * policy.block_length)
        view, status = self._view(), arrays.status[slots]
        planned = Rows(
            status=status.copy(),
            reach=reach.copy(),
            start=rows["start"],
            requests=requests_at(_opened(self.state[0]), rows["request"], slots),
        )
        source = f"policy {policy.name}: {type(policy.granularity).__name__}.select"
        window = array_of(policy.granularity.select(view, planned), source, np.bool_, status.shape)
        wrong = window & ((status == CACHED) | (np.arange(policy.width) >= reach[:, None]))
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise PolicyError(
                f"{source} returned position {column} of row {row}, which is cached or beyond {reach[row]}"
            )
        if not window.any():
            raise PolicyError(f"{source} returned no position of any of {len(slots)} rows, expected at least one")
        arrays.window[slots] = window

    def _unmask(self, draws: Any) -> None:
        """Have the policy choose the commits of the step in flight."""
        counters, arrays, rule = self._counters, self._arrays, self.policy.unmasking
        slots = arrays.lists[ROWS, : int(counters["num_rows"])]
        rows = arrays.sequences[slots]
        if rule.varies:
            draws = draws[int(counters["threshold"])]
        masks = Masks(
            status=arrays.status[slots],
            evaluations=arrays.evaluations[slots],
            window=arrays.window[slots],
            start=rows["start"],
            prompt=rows["prompt"],
            request=rows["request"],
        )
        arrays.committed[slots] = unmask_drawn(rule, masks, draws)

    def commit(self, outcome: StepOutcome, now: float) -> Ints:
        """Apply the outcome of the step in flight; returns the requests that finished.

        PolicyError if steps or a row make no progress.
        """
        counters, arrays = self._counters, self._arrays
        assert counters["kind"] != NOTHING, "no step is in flight"
        slots = arrays.lists[ROWS, : int(counters["num_rows"])]
        committed, retained = outcome.committed, outcome.retained
        window, status = arrays.window[slots], arrays.status[slots]
        assert committed.shape == window.shape, f"{committed.shape} commits for a window of {window.shape}"
        assert self.policy.rows.commits == "tokens" or not (committed & ~(window & (status == MASKED))).any(), (
            "only computed masks commit"
        )
        assert retained is None or counters["evicting"], "the plan evicts nothing"
        if retained is not None:
            assert not (retained & ~window).any(), "only computed positions are retained"
            assert not (window & (status != MASKED) & ~retained).any(), "only masks are evicted"
            assert not (committed & ~retained).any(), "only retained masks commit"
            arrays.retained[slots] = retained
            arrays.sequences["num_retained"][slots] = retained.sum(axis=1)
        counters["evicting"] = retained is not None
        arrays.committed[slots] = committed
        if outcome.ends is not None:
            rows, ends = arrays.sequences[slots], outcome.ends
            assert ((ends <= rows["end"]) & (ends >= rows["prompt"] + rows["emitted"])).all(), (
                "an end before what is handed out"
            )
            answer = np.minimum(rows["answer"], ends)
            arrays.sequences["end"][slots], arrays.sequences["answer"][slots] = ends, answer
            arrays.sequences["stop"][slots] = np.minimum(rows["stop"], ends)
        counters["latency"] = outcome.latency
        if outcome.device == outcome.device:  # not NaN: measured
            if self._host.counts is NO_COUNTS:
                self._host = TimeHistogram()
            self._host.add(max(0.0, outcome.latency - outcome.device))
        self.core.commit(*self.state, float(now))
        self._check_progress()
        return arrays.lists[DONE, : int(counters["num_done"])].copy()

    def _plan(self) -> StepPlan:
        counters, arrays = self._counters, self._arrays
        slots = arrays.lists[ROWS, : int(counters["num_rows"])].copy()
        rows = arrays.sequences[slots]
        kind = Continued if counters["continues"] else Features
        features = kind(**{name: int(counters[name]) for name in Features._fields})
        eviction: Any = self.policy.eviction  # one that evicts has `evicting`
        evicting, first = None, None
        if counters["evicting"]:
            evicting = eviction.evicting(self._own.columns[slots])
        if counters["first_tokens"]:
            tokens, qk_pairs, keys = (int(counters[name]) for name in ("first_tokens", "first_q_kv", "first_kv"))
            first = features._replace(tokens=tokens, sum_q_kv=qk_pairs, sum_kv=keys)
        return StepPlan(
            now=float(counters["now"]),
            step=int(counters["num_steps"]) - 1,
            prefill=bool(counters["kind"] == PREFILL_STEP),
            requests=rows["request"].copy(),
            phases=rows["phase"].copy(),
            num_tokens=rows["num_tokens"].copy(),
            num_keys=rows["num_keys"].copy(),
            window=arrays.window[slots],
            status=arrays.status[slots],
            evaluations=arrays.evaluations[slots],
            block_start=rows["start"].copy(),
            prompt=rows["prompt"].copy(),
            end=rows["end"].copy(),
            chunk=int(counters["chunk"]),
            features=features,
            slots=slots,
            waiting=int(counters["waiting"]),
            running=int(counters["running"]),
            pages=int(counters["pages"]),
            submitted=int(counters["submitted_then"]),
            preempted=tuple(arrays.lists[PREEMPTED, : int(counters["num_preempted"])].tolist()),
            freed=tuple(arrays.lists[FREED, : int(counters["num_freed"])].tolist()),
            evicting=evicting,
            first=first,
            threshold=self._threshold(),
        )

    def _threshold(self) -> float | None:
        """The step's threshold; None if it never varies."""
        rule = self.policy.unmasking
        if not rule.varies:
            return None
        return float(rule.thresholds[self._counters["threshold"]])

    # ---- many steps ------------------------------------------------------------------------------------------

    def run(
        self,
        now: float,
        horizon: float,
        draws: Draws | tuple[Draws, ...],
        cost: Cost,
        recorder: StepRecorder | None = None,
        until_finish: bool = False,
    ) -> float:
        """End the step in flight, then run predicted steps up to the first that ends at or after the horizon.

        draws: one per threshold if steps choose one. until_finish: stop when a request finishes. Returns when to call
        again (s). Bit for bit the same as `schedule`, step model, `commit`.
        """
        counters, self.blocked = self._counters, False
        span = core.Span(float(now), float(horizon), STEPS_A_CALL, until_finish)  # an int would compile again
        while True:
            journal = NO_JOURNAL
            if recorder is not None:
                journal = recorder.journal
            run = self._entry(draws, cost, journal)
            reason = run(*self.state, draws, cost, journal, span)
            if reason == core.IN_FLIGHT:
                return float(counters["now"] + counters["latency"])
            goes_on = self.goes_on(reason, recorder, draws)
            span = span._replace(now=float(counters["clock"]))
            if not goes_on or (self.withheld and span.now >= span.horizon):
                return span.now

    def goes_on(self, reason: int, recorder: StepRecorder | None, draws: Any) -> bool:
        """Handle why compiled code returned (`core`); True if it can be called again at `clock`.

        draws: as in `run`. PolicyError if the policy's answer is impossible or steps make no progress.
        """
        if reason == core.JOURNAL_FULL:
            assert recorder is not None
            recorder.make_room(int(self._counters["num_rows"]))
            return False  # so that a run with a journal can be stopped
        if reason == core.NO_SLOTS:
            self._make_slots()
        elif reason == core.NO_QUEUE:
            self._make_queue()
        elif reason == core.ASKS:
            self._ask()
            self._counters["is_asked"] = True
            self.caps.apply(draws)
        elif reason == core.IDLE_NOW:
            self._note_withheld(True)
            if not self.withheld:
                self._check_idle()
                return False
            assert self._withheld is not None
            self._counters["clock"] += max(EMPTY_STEP, (self.clock - self._withheld[0]) / 100)  # an error of 1 %
        else:
            self._check_progress()
            return False
        return True

    def _entry(self, draws: Any, cost: Cost, journal: Any) -> Any:
        """core.run, compiled for these arguments' types, which never change."""
        if self.asks_python:
            return self._run_plain
        if self.is_young:
            return self.core.run_young
        if self._run is None or self._run[0] is not draws or self._run[1] is not cost:
            compiled = self.core.entry("run", *self.state, draws, cost, journal, core.Span(0.0, 0.0, 0, False))
            self._run = draws, cost, compiled
        return self._run[2]

    def _run_plain(
        self, replica: Replica, policy: AnyPolicy, draws: Any, cost: Cost, journal: Any, span: core.Span
    ) -> int:
        """core.run step by step, for policies with Python methods."""
        counters = self._counters
        counters["clock"] = span.now
        for _ in range(span.limit):
            if counters["kind"] == NOTHING:
                now = float(counters["clock"])
                if counters["num_free"] < min(int(counters["num_waiting"]), int(self._fixed.max_batch)):
                    return core.NO_SLOTS
                if self._schedule(now) == NOTHING:
                    return core.IDLE_NOW
                self.caps.apply(draws)
                if self.policy.unmasking.chooses:
                    self._unmask(draws)
                self.core.predict(replica, policy, draws, cost)
                if not now + counters["latency"] < span.horizon:
                    return core.IN_FLIGHT
            if not self.core.end_step(replica, policy, journal):
                return core.JOURNAL_FULL
            if counters["stalled"]:
                return core.STALLED
            if span.until_finish and counters["num_done"] > 0:
                return core.FINISHED
        return core.PAUSED

    # ---- room ------------------------------------------------------------------------------------------------

    def _make_slots(self) -> None:
        """Make a slot for each request that the next decision may admit."""
        counters = self._counters
        needed = min(int(counters["num_waiting"]), int(self._fixed.max_batch))
        if int(counters["num_free"]) < needed:
            self._grow(max(2 * len(self._arrays.sequences), len(self._arrays.sequences) + needed))

    def _make_queue(self) -> None:
        self._set(with_queue(self._arrays, len(self._arrays.sequences) + 1))

    def _grow(self, capacity: int) -> None:
        arrays = with_slots(self._arrays, capacity)
        self._own = self._own._replace(columns=self._columns(capacity, self._own.columns))
        # Room for all running requests, which may be preempted, and the inbox.
        counters: Any = arrays.counters
        to_come = len(arrays.inbox.requests) - int(counters["entered"][0])
        self._set(with_queue(arrays, capacity + 1 + to_come))

    def _columns(self, capacity: int, old: Any = None) -> Any:
        kinds = [column for component in self.policy.parts() for column in component.columns] or [("none", "u1")]
        columns = np.zeros(capacity, np.dtype(kinds, align=True))
        if old is not None:
            columns[: len(old)] = old
        return columns

    def _set(self, arrays: Any) -> None:
        self._arrays = arrays
        self._counters = arrays.counters[0]
        self.state = as_tables(arrays), as_tables(self._own)  # for compiled entries
        self._moved(self.state)

    def join(self, counters: Any, bins: Any, moved: Callable[[tuple[Any, Any]], None]) -> None:
        """Use these counters [1], and bins that other replicas share (Replicas).

        moved: called with the state's arrays whenever they are replaced.
        """
        counters[:] = self._arrays.counters
        self._moved, self._shares_bins = moved, True
        self._set(self._arrays._replace(counters=counters, bins=bins))

    @property
    def is_young(self) -> bool:
        """Whether it steps in plain Python, since the run may be too short to compile for."""
        return self.core.is_young(len(self.table.rows))

    @property
    def runs_alone(self) -> bool:
        """Whether Replicas must not run it: the policy asks Python, or the run is too short to compile."""
        return self.asks_python or self.is_young or self.core.is_young(len(self.table.rows), "keep_state")

    def _check_progress(self) -> None:
        counters, arrays = self._counters, self._arrays
        if not counters["stalled"]:
            return
        running = arrays.lists[RUNNING, : int(counters["num_running"])]
        for row in arrays.sequences[running]:
            if row["fruitless"] >= MOST_FRUITLESS:
                raise self._stall(f"request {row['request']} committed nothing in {MOST_FRUITLESS} steps of it")
        raise self._stall(f"{MOST_FRUITLESS} steps in a row committed nothing and finished nothing")

    def _check_idle(self) -> None:
        self.blocked = self._absent_pages > 0
        if (self.num_waiting or self.num_running) and not self.blocked:
            kind = type(self.policy.batching).__name__
            raise self._stall(f"{kind} runs nothing, and {self.num_running} run and {self.num_waiting} wait")

    def _note_withheld(self, runs_nothing: bool) -> None:
        waits = (self.num_waiting or self.num_running) and self.num_waiting >= self._counters["ask_from"]
        if not (runs_nothing and waits) or self._absent_pages:
            self._withheld = None
        elif self._withheld is None or self._withheld[1] < self.num_steps:
            self._withheld = self.clock, self.num_steps
        elif self.clock - self._withheld[0] > MOST_WITHHELD:
            waiting = f"{self.num_running} run and {self.num_waiting} wait"
            kind = type(self.policy.discipline).__name__
            raise self._stall(f"{kind} lets nothing run for {MOST_WITHHELD:g} s, and {waiting}")

    def _stall(self, reason: str) -> PolicyError:
        time = self._counters["clock"]
        return PolicyError(f"policy {self.policy.name}: replica {self.replica} at {time:.6g} s: {reason}")


def record_of(policy: Policy) -> Any:
    """One `policy.record` array."""
    fields: dict[str, Any] = {}
    for component in policy.parts():
        record = component.record(policy)
        if shared := sorted(fields.keys() & record):
            raise PolicyError(f"{policy.name}: two parts have a record {shared[0]}, expected another name in one")
        fields.update(record)
    kinds = []
    for name, value in (fields or {"none": 0}).items():
        array = np.asarray(value)
        kinds.append((name, array.dtype.str, array.shape))
    records = np.zeros(1, np.dtype(kinds, align=True))
    for name, value in fields.items():
        records[name] = value
    return records


def _times(bins: Any, counters: Any, name: str) -> TimeHistogram:
    times = TimeHistogram(bins)
    times.count = int(counters[f"{name}_count"])
    times.sum, times.min, times.max = (float(counters[f"{name}_{key}"]) for key in ("sum", "min", "max"))
    return times


def _counts(counts: Any) -> CountHistogram:
    histogram = CountHistogram()
    histogram.counts.update({int(i): int(counts[i]) for i in np.flatnonzero(counts)})
    return histogram
