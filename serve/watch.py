"""Turns a replica's steps and replies into the quantities that metrics show."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..engine.engine import Engine
from ..engine.prefix import Prefixes, caches_prefixes
from ..engine.step import StepOutcome, StepPlan
from .clock import Clock
from .metric import Metric
from .tallies import Tallies

WINDOW = 40  # steps per average in SGLang: its --decode-log-interval


class Timed(Protocol):
    """An executor that knows how a step's time divides."""

    def host(self, plan: StepPlan) -> float:
        """s of a step in which the device waits for the host."""

    def captured(self, plan: StepPlan) -> bool:
        """Whether a step replays a graph."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a step sent to one client."""

    request: int
    num: int
    first: bool
    last: bool
    gap: float  # s since the tokens before
    due: float  # s: when the request reached the engine
    streamed: bool
    output_length: int  # requested


class Watch:
    """Counts of one replica; its thread calls `begun`, `sent` and `step`."""

    num_done: int  # requests
    num_cancelled: int
    throughput: float  # tokens/s over the last decode steps
    hit_rate: float  # share of the last batch's tokens
    captured: bool  # the last step replayed a graph
    cpu: float  # s of processor time in the replica's thread

    def __init__(
        self, metrics: Sequence[Metric], engine: Engine, clock: Clock, prefixes: Prefixes | None, timed: Timed | None,
        handles: bool = False,
    ) -> None:  # fmt: skip
        """handles: a request's latencies begin when it has one of the engine's max_batch handles."""
        self.tallies = Tallies(metrics, engine.limits.context_limit)
        self.num_done = self.num_cancelled = 0
        self.throughput = self.hit_rate = self.cpu = 0.0
        self.captured = False
        self._occupancy = math.nan
        self._engine, self._clock, self._timed = engine, clock, timed
        self._cached = prefixes.cached if prefixes is not None and caches_prefixes(engine.policy) else None
        self._by_token = engine.policy.rows.commits == "tokens"
        # SGLang's synchronous rounds report at the end of their blocks.
        self._every_forward = getattr(engine.policy.batching, "dllm_fdfo", True)
        self._idle = self._shown_idle = self._busy = self._host = 0.0  # s
        self._end = clock()
        self._window = self._decoding = (0, 0.0, self._end)  # steps, device seconds or tokens, start
        self._hits = self._evicted = 0
        self._has_stages = any(metric.value == "stage" for metric in metrics)
        self._chunks: dict[int, float] = {}  # s, end of a request's last chunk that did not end its prompt
        self._handles = Handles(engine.limits.max_batch) if handles else None
        self._handed: dict[int, float] = {}  # s, by request

    @property
    def idle(self) -> float:
        """Seconds without requests."""
        now = self._idle + (max(0.0, self._clock() - self._end) if self._engine.idle else 0.0)
        self._shown_idle = max(self._shown_idle, now)  # a request may have come since the clock was read
        return self._shown_idle

    @property
    def occupancy(self) -> float:
        """% of the last steps' time in which the device worked; NaN without requests."""
        return math.nan if self._engine.idle else self._occupancy

    @property
    def stages(self) -> dict[str, float]:
        """s per stage of SGLang's scheduler."""
        return {"run_batch": self._busy, "other": self._host, "idle": self.idle}

    def queued(self) -> None:
        """Count a request that entered the queue, at the moment that it reached the engine."""
        self.tallies.add("stage", 0.0, {"stage": "request_process"})

    def begun(self, request: int, due: float) -> None:
        """A request's first step; it reached the engine at `due` (s)."""
        self.tallies.add("queue_time_at_start", float(self._engine.table["scheduled"][request]) - due)
        self._hits += self._cached_of(request)
        if self._handles is not None:
            self._handed[request] = self._handles.take(float(self._engine.table["arrival"][request]))

    def cancelled(self, request: int, begun: bool) -> None:
        """Count a request whose client went away."""
        self.num_cancelled += 1
        self._chunks.pop(request, None)
        if begun:
            self._free(request, self._clock())

    def _free(self, request: int, now: float) -> None:
        if self._handles is not None:
            self._handles.free(now)
            self._handed.pop(request, None)

    def sent(self, sent: Sent) -> int:
        """Returns the computed prompt tokens, with the first tokens of a reply, else 0."""
        add, table, i = self.tallies.add, self._engine.table, sent.request
        prompt, cached = int(table["input_length"][i]), self._cached_of(i)
        labels = {"is_streaming": "true" if sent.streamed else "false"}
        arrival, first = self._arrival(i), float(table["first_emission"][i])
        if sent.first:
            add("ttft", first - arrival, labels)
            add("prompt_tokens", prompt)
            add("cached_tokens", cached)
            add("prompt_tokens_by_source", prompt - cached, {"source": "local_compute"})
            add("prompt_tokens_by_source", cached, {"source": "local_cache_hit"})
        elif sent.num:
            add("gap", sent.gap)
            add("gap_per_token", sent.gap / sent.num)
            add("gap_of_each_token", sent.gap / sent.num, times=sent.num)
        add("generation_tokens", sent.num)
        if sent.num:
            add("output_tokens", sent.num + (prompt if sent.first else 0))
        if sent.last:
            self._finished(sent, prompt, cached, labels)
        return prompt - cached if sent.first else 0

    def _finished(self, sent: Sent, prompt: int, cached: int, labels: dict[str, str]) -> None:
        add, table, i = self.tallies.add, self._engine.table, sent.request
        self.num_done += 1
        num = int(table["num_tokens"][i])
        begin, first, end = (float(table[name][i]) for name in ("scheduled", "first_emission", "finish"))
        arrival = self._arrival(i)
        add("finished", 1, {"finished_reason": "stop" if num < sent.output_length else "length"})
        add("finished_type", 1, {"finished_reason": "ResponseType.FINISH"})
        add("num_replies", 1, labels)
        add("input_length", prompt, labels)
        add("output_length", num, labels)
        add("max_tokens", sent.output_length)
        add("computed_tokens", prompt - cached)
        add("cached_length", cached)
        add("cached_share", cached / prompt)
        if cached:
            add("cached_by_source", cached, {"cache_source": "device"})
        add("num_preemptions", int(table["num_preemptions"][i]))
        add("e2el", end - arrival, labels)
        add("queue_time", begin - max(sent.due, arrival))
        add("inference", end - begin)
        add("prefill", first - begin)
        add("decode", end - first)
        add("tpot", (end - first) / max(1, num - 1), labels)
        self._free(i, end)

    def step(self, plan: StepPlan, outcome: StepOutcome, end: float, num_sent: int, num_prompt: int) -> float:
        """Returns the device's s of a finished step.

        num_sent: tokens. num_prompt: computed prompt tokens of requests whose reply began.
        """
        add = self.tallies.add
        self.cpu = time.thread_time()
        if num_sent:
            add("iteration_tokens", num_sent + num_prompt)
        self._count_lost(plan)
        if self._has_stages and self._by_token:
            self._count_prefills(plan, end)
        idle = max(0.0, plan.now - self._end)
        self._idle += idle
        self._end = end
        host, self.captured = self._split(plan, outcome)
        busy = outcome.latency - host
        self._busy += busy
        self._host += host
        decode = self._by_token and not plan.prefill
        named = "decode" if decode else "dllm_extend" if self.captured and not plan.prefill else "extend"
        add("forward_seconds", busy, {"category": named})
        if idle:
            self._window = (0, 0.0, plan.now)
        self._window, occupancy = _after(self._window, busy, end)
        self._occupancy = 100.0 * occupancy if occupancy is not None else self._occupancy
        if decode:
            self._decoding, throughput = _after(self._decoding, num_sent, end)
            self.throughput = throughput if throughput is not None else self.throughput
        if self._every_forward or plan.prefill or num_sent:
            self._report(plan, decode, num_sent)
        return busy

    def _count_lost(self, plan: StepPlan) -> None:
        add, table = self.tallies.add, self._engine.table
        for request in plan.preempted:
            add("retracted", 1)
            add("retracted_input", int(table["input_length"][request]))
            add("retracted_output", int(table["num_tokens"][request]))
        evicted = self._engine.evicted_pages
        if evicted > self._evicted:
            add("eviction", 0.0)
        self._evicted = evicted

    def _count_prefills(self, plan: StepPlan, end: float) -> None:
        """The release takes no such times of a diffusion model."""
        table = self._engine.table
        for request in plan.requests.tolist():
            begin, first = float(table["scheduled"][request]), float(table["first_emission"][request])
            if math.isnan(first):
                self.tallies.add("stage", end - self._chunks.get(request, begin), {"stage": "chunked_prefill"})
                self._chunks[request] = end
            elif first == end:
                self._chunks.pop(request, None)
                self.tallies.add("stage", first - begin, {"stage": "prefill_forward"})

    def _report(self, plan: StepPlan, decode: bool, num_sent: int) -> None:
        """What the release's scheduler reports for one batch."""
        add, tokens, hits = self.tallies.add, plan.features.tokens, self._hits
        add("passes", 1, {"mode": f"{'decode' if decode else 'prefill'}_{'cuda_graph' if self.captured else 'none'}"})
        computed = plan.features.prefill_tokens if decode else tokens
        for mode, num in (("prefill_compute", computed), ("prefill_cache", hits), ("decode", num_sent * decode)):
            if num:
                add("realtime_tokens", num, {"mode": mode})
        if not decode:
            add("effective_tokens", tokens, {"mode": "input"})
            add("effective_tokens", hits, {"mode": "device_hit"})
            self.hit_rate = hits / max(1, tokens + hits)
            self._hits = 0

    def _split(self, plan: StepPlan, outcome: StepOutcome) -> tuple[float, bool]:
        """The host's s of a step, and whether it replayed a graph."""
        if self._timed is not None:
            return min(outcome.latency, self._timed.host(plan)), self._timed.captured(plan)
        return (0.0 if np.isnan(outcome.device) else outcome.latency - outcome.device), False

    def _arrival(self, request: int) -> float:
        """When a request's latencies begin (s)."""
        return self._handed.get(request, float(self._engine.table["arrival"][request]))

    def _cached_of(self, request: int) -> int:
        return 0 if self._cached is None else int(self._cached[request])


class Handles:
    """LMDeploy's handles: a request takes one of `count` before it reaches the engine, in order of arrival."""

    def __init__(self, count: int) -> None:
        self._count, self._taken, self._freed = count, 0, 0
        self._times: deque[float] = deque(maxlen=count)  # s, when the last ones were freed

    def take(self, arrival: float) -> float:
        """When the next request had a handle (s). It has begun, so its handle is free or was freed."""
        at = self._taken - self._count - (self._freed - len(self._times))
        self._taken += 1
        return max(arrival, self._times[at]) if at >= 0 else arrival

    def free(self, now: float) -> None:
        """Free a handle."""
        self._times.append(now)
        self._freed += 1


def _after(window: tuple[int, float, float], more: float, now: float) -> tuple[tuple[int, float, float], float | None]:
    """A window with one more step; if full, its sum per second and a new window."""
    steps, total, begin = window[0] + 1, window[1] + more, window[2]
    if steps < WINDOW:
        return (steps, total, begin), None
    return (0, 0.0, now), total / max(1e-9, now - begin)
