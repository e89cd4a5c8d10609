"""The twin: a trace through replicas of a policy, priced by a profile."""

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from ..engine.commits import (
    CanvasLaw,
    CommitDraws,
    CommitModel,
)
from ..engine.engine import Engine, Limits
from ..engine.errors import PolicyError, TraceError, cut
from ..engine.journal import RequestTable, StepRecorder, StepTotals
from ..engine.latency import LatencyModel
from ..engine.policy import Policy
from ..engine.prefix import caches_prefixes
from ..engine.request import Request
from ..engine.state import UNFINISHED, Asked
from ..files.interrupt import asked_to_stop
from ..traces import Trace
from ..traces.prefixes import prefixes_of
from .clock import Clock
from .replica import Replica
from .router import router as make_router
from .setting import Setting

Append = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    policy: Policy
    limits: Limits
    commit_model: CommitModel | None  # None: autoregressive
    table: RequestTable
    totals: StepTotals
    end: float  # s, simulated
    interrupted: bool
    num_made_ready: int = 0  # on a device: kernels compiled and graphs captured inside steps
    cached_tokens: npt.NDArray[np.int64] | None = None  # [requests] of prompts, found in a prefix cache if there is one
    law: CanvasLaw | None = None  # of how many forwards its blocks or canvases took; None: no law said so


def simulate(
    trace: Trace,
    setting: Setting,
    *,
    replicas: int = 1,
    router: str = "round-robin",
    seed: int = 0,
    emit: str = "block",
    concurrency: int | None = None,
    sessions: bool = False,
    drain: bool = True,
    eos: bool = False,
    append: Append | None = None,
    progress: Progress | None = None,
) -> Result:
    """Replay a trace: open loop, or closed with `concurrency` requests in flight.

    sessions: a turn whose time comes while the turn before it is in flight is sent as that ends.
    drain: go on after the last arrival until all is served; otherwise what is in flight then stays unfinished.
    eos: a request's last token is an EOS, and nobody foresees it. Of one whose limit the trace says, max_tokens, it is
    where the answer is shorter; what an EOS ends is the policy's `eos` (see also `_past_eos`).
    append: receives the journal's steps in batches (STEP_COLUMNS, STEP_LISTS as values and offsets).
    progress: called with the requests ended so far and the simulated time.
    Ctrl-C ends the run early, with what is done.
    """
    if replicas < 1:
        raise PolicyError(f"replicas is {replicas}, expected at least 1")
    if concurrency is not None and concurrency < 1:
        raise TraceError(f"concurrency is {concurrency}, expected at least 1")
    if not len(trace):
        raise TraceError(f"{trace.name} holds no requests")
    policy, profile, limits = setting.policy, setting.profile, setting.limits
    setting.check()
    caches = caches_prefixes(policy)
    prefixes = prefixes_of(trace) if caches or router == "prefix" else None
    missed = np.zeros(len(trace), np.bool_)
    if policy.family == "block-diffusion" and policy.unmasking.eos == "block":
        trace, missed = _past_eos(trace, policy.block_length, eos)
    check_fit(trace, limits, policy)
    draws = setting.draws(seed, trace)
    if isinstance(draws, CommitDraws):
        draws.miss_eos(missed, trace.max_tokens > 0)
    step_model = setting.step_model(draws)
    closed = concurrency is not None or sessions  # requests come when others have ended
    table = RequestTable(len(trace), None if closed else trace.arrival, Asked(*trace.lengths))
    env = Clock()
    route = make_router(router, prefixes)
    recorder = None if append is None else StepRecorder(append, policy.width)
    ended = 0

    def finished(more: int, now: float) -> None:
        nonlocal ended
        ended += more
        if loop is not None:
            loop.next(more)
        if turns is not None:
            turns.send()
        if progress is not None:
            progress(ended, now)

    turns = _Turns(env, trace, table, lambda request: submit(request), profile.frontend) if sessions else None
    arrivals = _Arrivals(env, trace, drain, profile.frontend)

    def loop_arrivals() -> float:
        return math.inf if loop is None else loop.next_time()

    def horizon(r: int) -> Callable[[], float]:
        if concurrency is not None:
            # The next arrival is when a request of this very replica ends, or at any end of another's.
            return loop_arrivals if replicas == 1 else (lambda: env.now)
        if turns is not None:  # likewise
            return (lambda: min(arrivals.next_time(), turns.next_time())) if replicas == 1 else (lambda: env.now)
        # A router that looks at no replica sends each every n-th arrival.
        return partial(arrivals.next_time, r, replicas) if router == "round-robin" else arrivals.next_time

    fleet: list[Replica] = []
    for r in range(replicas):
        engine = setting.engine(table, replica=r, emit=emit, eos=eos, prefixes=prefixes)
        fleet.append(Replica(env, engine, step_model, recorder, finished, horizon(r), closed))
    engines = [replica.engine for replica in fleet]

    def submit(request: Request) -> bool:
        return fleet[route(engines, request)].submit(request)

    loop = None if concurrency is None else _ClosedLoop(env, trace, submit, profile.frontend)
    interrupted = False
    try:
        with asked_to_stop(env.stop):
            if loop is not None:
                loop.next(concurrency or 0)
                env.run()
            else:
                last = env.process(arrivals.run(submit if turns is None else turns.come))
                env.run(None if drain else last)
    except KeyboardInterrupt:
        interrupted = True
    interrupted = interrupted or env.stopping  # it may have come as the last event was processed
    totals = StepTotals()
    for engine in engines:
        totals.merge(engine.totals)
    if recorder is not None:
        recorder.flush()
    cached = prefixes.cached if prefixes is not None and caches else None
    return Result(
        policy, limits, setting.commits, table, totals, env.now, interrupted, cached_tokens=cached, law=setting.law
    )


def _past_eos(trace: Trace, block: int, eos: bool) -> tuple[Trace, npt.NDArray[np.bool_]]:
    """The trace as LMDeploy serves it when requests end at an EOS, and the requests for which that makes a difference.

    An EOS stops a request with its block, as a limit does. But one in the block that the prompt ends in is not looked
    for (block-diffusion.md 1.6): the request goes on to the first position of the next block, which is all padding, if
    its limit lies so far. eos: also requests whose limit the trace does not say end at an EOS.
    """
    partial, answer, limit = -trace.input_length % block, trace.output_length, trace.max_tokens
    ends = (limit > answer) | ((limit == 0) & eos)
    missed = ends & (partial > 0) & (answer > 0) & (answer <= partial) & ((limit == 0) | (limit > partial))
    if not missed.any():
        return trace, missed  # nothing is copied
    return replace(trace, output_length=np.where(missed, partial + 1, answer)), missed


class _Arrivals:
    """The open loop: each request is submitted at its time, whatever became of the others.

    delay: s from a client to the engine and back; all of it counts on the way there.
    """

    def __init__(self, env: Clock, trace: Trace, drain: bool, delay: float = 0.0) -> None:
        self._env = env
        self._trace = trace
        self._delay = delay
        self._next = 0
        self._end = math.inf if drain else float(trace.arrival[-1]) + delay

    def next_time(self, turn: int = 0, every: int = 1) -> float:
        """The time of the next arrival whose index is `turn` modulo `every`, or of the run's end if there is none."""
        i = self._next + (turn - self._next) % every
        return float(self._trace.arrival[i]) + self._delay if i < len(self._trace) else self._end

    def run(self, submit: Callable[[Request], bool]) -> Generator[simpy.Event, Any, None]:
        """Submit the trace's requests."""
        env = self._env
        for i in range(len(self._trace)):
            request = self._trace.request(i)
            if request.arrival + self._delay > env.now:
                yield env.at(request.arrival + self._delay, urgent=True)
            self._next = i + 1
            submit(request)
        yield env.timeout(0)


class _Turns:
    """Turns of sessions: each is sent once the turn before it has ended, and not before its time.

    delay: s, as the open loop's.
    """

    def __init__(
        self, env: Clock, trace: Trace, table: RequestTable, submit: Callable[[Request], bool], delay: float
    ) -> None:
        told = trace.extras.get("session_id")
        if told is None:
            raise TraceError(f"{trace.name}: none of its {len(trace)} requests has a session_id, expected some")
        self._env, self._table, self._submit, self._delay = env, table, submit, delay
        self._before: list[int] = []  # the index of the turn before, or -1
        self._held: list[Request] = []  # whose time has come
        self._underway: deque[Request] = deque()
        last: dict[str, int] = {}
        for i, session in enumerate(told):
            self._before.append(-1 if session is None else last.get(str(session), -1))
            if session is not None:
                last[str(session)] = i

    def next_time(self) -> float:
        """When the next turn reaches the fleet that was held and is on its way there."""
        return self._underway[0].arrival + self._delay if self._underway else math.inf

    def come(self, request: Request) -> bool:
        """A request's time has come; whether it was sent."""
        self._held.append(request)
        self.send()
        return request not in self._held

    def send(self) -> None:
        """Send the turns whose time has come and which wait for nobody."""
        while ready := [request for request in self._held if self._ended(self._before[request.index])]:
            self._held.remove(ready[0])  # one that is rejected has ended, too
            self._send(ready[0])

    def _ended(self, before: int) -> bool:
        return before < 0 or bool(self._table["status"][before] != UNFINISHED)

    def _send(self, request: Request) -> None:
        before, t = self._before[request.index], self._table
        if before >= 0:  # one that was rejected ended as it was sent
            end = float(np.fmax(t["finish"][before], t["arrival"][before]))
            request = replace(request, arrival=max(request.arrival, end))
        if request.arrival + self._delay > self._env.now:
            self._underway.append(request)
            self._env.process(self._arrive())
        else:
            self._submit(request)

    def _arrive(self) -> Generator[simpy.Event, Any, None]:
        """The turn that has been on its way longest reaches the fleet."""
        yield self._env.at(self._underway[-1].arrival + self._delay, urgent=True)
        self._submit(self._underway.popleft())
        self.send()


class _ClosedLoop:
    """Workers that share the trace as a queue: each submits its next request when its last one ends."""

    def __init__(self, env: Clock, trace: Trace, submit: Callable[[Request], bool], delay: float = 0.0) -> None:
        self._env = env
        self._trace = trace
        self._submit = submit
        self._delay = delay  # s, as the open loop's
        self._underway: deque[Request] = deque()
        self._taken = 0

    def next_time(self) -> float:
        """When the next request reaches the fleet that is on its way there."""
        return self._time_of(self._underway[0]) if self._underway else math.inf

    def next(self, workers: int) -> None:
        """So many workers are free."""
        while workers and self._taken < len(self._trace):
            request = self._trace.request(self._taken)
            self._taken += 1
            asked = replace(request, arrival=self._env.now)
            if self._delay:
                self._underway.append(asked)
                self._env.process(self._arrive())
                workers -= 1
            elif self._submit(asked):  # one that is rejected ends at once
                workers -= 1

    def _arrive(self) -> Generator[simpy.Event, Any, None]:
        """The request that has been on its way longest reaches the fleet."""
        yield self._env.at(self._time_of(self._underway[-1]), urgent=True)
        if not self._submit(self._underway.popleft()):
            self.next(1)

    def _time_of(self, request: Request) -> float:
        """When a request that was sent reaches the fleet."""
        return request.arrival + self._delay


def check_fit(trace: Trace, limits: Limits, policy: Policy) -> None:
    """TraceError unless at least one of the trace's requests could ever be served."""
    engine = Engine(policy, limits, RequestTable(0), latency=LatencyModel(((0.0, 0.0),), 0.0))
    if any(engine.fits(trace.request(i)) for i in range(len(trace))):
        return
    if policy.family == "full-sequence":
        raise TraceError(
            f"{trace.name}: none of its {len(trace)} requests fits the context of {limits.context_limit} tokens, "
            f"{limits.num_pages} pages of {policy.memory.page_size} and the tokens of a step"
        )
    length = trace.input_length + trace.limit
    if not policy.batching.fits(policy, int(length.min())):
        raise TraceError(
            f"{trace.name}: none of its {len(trace)} requests fits: the shortest has {int(length.min())} tokens, more "
            f"than a step of {cut(policy.name)} takes"
        )
    i = int(np.argmin(length))
    pages, seen = engine.most_pages(trace.request(i))
    found, expected = f"{pages + seen} pages", f"{limits.num_pages} pages of {policy.memory.page_size}"
    if of_windows := policy.memory.pools(limits.num_pages, limits.window_bytes, limits.kv_bytes)[1]:
        found += f", {seen} of them in layers with a window"
        expected += f", {of_windows} of them for layers with a window"
    raise TraceError(
        f"{trace.name}: none of its {len(trace)} requests fits: the shortest has {int(length[i])} tokens "
        f"({found}), expected at most {limits.context_limit} tokens (context) and {expected}"
    )
