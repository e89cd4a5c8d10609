"""How requests come: at their times, turn by turn within sessions, or in a closed loop."""

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from ..engine.engine import Engine
from ..engine.errors import TraceError
from ..engine.jit import is_ours
from ..engine.journal import RequestTable
from ..engine.request import Request
from ..engine.state import UNFINISHED, Inbox
from ..traces import Trace
from ..traces.trace import Ints
from .clock import ARRIVAL, Clock
from .group import Group

Submit = Callable[[Request], bool]  # False: rejected


class OpenLoop:
    """Submits each request at its time; the front end's time counts on the way in."""

    foresees = True  # `next_time` holds when requests end earlier

    def __init__(self, env: Clock, trace: Trace, submit: Submit, drain: bool, frontend: float = 0.0) -> None:
        self._env = env
        self._trace = trace
        self._submit = submit
        self._reach = trace.arrival + frontend
        self._next = 0  # first request that is not handed over
        self._taker: Group | None = None  # to which all are handed over
        self._end = math.inf
        if not drain:
            self._end = float(self._reach[-1])

    def start(self) -> simpy.Event:
        """Begin; returns the event of the last arrival, or None if requests come until all have ended."""
        return self._env.process(self._run())

    def hand_over(self, engines: Sequence[Engine], chosen: Ints) -> None:
        """Have the engines submit the requests for which they are chosen; SimPy waits for the last one."""
        for i, engine in enumerate(engines):
            engine.expect(self._inbox(engine, np.flatnonzero(chosen == i).astype(np.int32)))
        self._next = len(self._trace)

    def hand_to(self, group: Group, engine: Engine, figures: tuple[str, ...]) -> None:
        """Hand all requests to a replica's group; SimPy waits for the last one."""
        group.take(self._inbox(engine, np.arange(len(self._trace), dtype=np.int32)), figures)
        self._next, self._taker = len(self._trace), group

    def _inbox(self, engine: Engine, rows: npt.NDArray[np.int32]) -> Inbox:
        trace = self._trace
        for name, column in trace.wishes.items():
            engine.table[name][rows] = column[rows]
        return Inbox(rows, self._reach[rows], _fitting(engine, trace, rows))

    def next_time(self, turn: int, every: int) -> float:
        """The next arrival (s) of a request whose index is `turn` modulo `every`, or the run's end."""
        i = self._next + (turn - self._next) % every
        if i < len(self._trace):
            return float(self._reach[i])
        return self._end

    def ended(self, count: int) -> None:
        """`count` more requests have ended."""

    @property
    def exhausted(self) -> bool:
        """No request is still to come."""
        if self._taker is None:
            return self._next == len(self._trace)
        return not self._taker.replicas.more_come and self._env.now >= self._reach[-1]

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env = self._env
        if self._next == len(self._trace):
            yield env.at(float(self._reach[-1]), ARRIVAL)
        for i in range(self._next, len(self._trace)):
            request = self._trace.request(i)
            if (reach := float(self._reach[i])) > env.now:
                yield env.at(reach, ARRIVAL)
            self._next = i + 1
            self._submit(request)
        yield env.timeout(0)


def _fitting(engine: Engine, trace: Trace, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    # Under shipped rules a longer request never takes less.
    if all(is_ours(type(component)) for component in engine.policy.parts()):
        longest = Request(0, 0.0, int(trace.input_length[rows].max(initial=0)), int(trace.limit[rows].max(initial=0)))
        if engine.fits(longest):
            return np.ones(len(rows), np.bool_)
    return np.array([engine.fits(trace.request(i)) for i in rows.tolist()], np.bool_)


class Underway:
    """Requests between their clients and the fleet; they arrive in the order of their sending."""

    def __init__(self, env: Clock, frontend: float, arrive: Callable[[Request], None]) -> None:
        self._env, self._frontend, self._arrive = env, frontend, arrive
        self._requests: deque[tuple[float, Request]] = deque()  # arrival at the fleet, request

    def delays(self, request: Request) -> bool:
        """Hold a request back until it arrives; False if it is there at once."""
        reach = request.arrival + self._frontend
        if reach <= self._env.now:
            return False
        self._requests.append((reach, request))
        self._env.call(reach, lambda: self._arrive(self._requests.popleft()[1]))
        return True

    @property
    def next_time(self) -> float:
        return min((reach for reach, _ in self._requests), default=math.inf)

    def __bool__(self) -> bool:
        return bool(self._requests)


class Sessions:
    """Submits a session's turn at its time, or when the turn before it has ended."""

    foresees = False

    def __init__(
        self, env: Clock, trace: Trace, table: RequestTable, submit: Submit, drain: bool, frontend: float = 0.0
    ) -> None:
        sessions = trace.extras.get("session_id")
        if sessions is None:
            raise TraceError(f"{trace.name}: none of its {len(trace)} requests has a session_id, expected some")
        self._table, self._submit = table, submit
        self._due = OpenLoop(env, trace, self._come, drain, frontend)
        self._underway = Underway(env, frontend, self._arrive)
        self._waiting: list[Request] = []  # due, but the turn before has not ended
        self._before: list[int] = []  # [requests] the index of the turn before, or -1
        last: dict[str, int] = {}
        for i, session in enumerate(sessions):
            self._before.append(-1)
            if session is not None:
                self._before[i] = last.get(str(session), -1)
                last[str(session)] = i

    def start(self) -> simpy.Event:
        return self._due.start()

    def next_time(self, turn: int, every: int) -> float:
        return min(self._due.next_time(turn, every), self._underway.next_time)

    def ended(self, count: int) -> None:
        self._send_due()

    @property
    def exhausted(self) -> bool:
        return self._due.exhausted and not self._waiting and not self._underway

    def _come(self, request: Request) -> bool:
        """Take a request at its time; True if it was sent at once."""
        self._waiting.append(request)
        self._send_due()
        return request not in self._waiting

    def _send_due(self) -> None:
        """Send the turns that wait for no other."""
        while ready := [request for request in self._waiting if self._is_over(self._before[request.index])]:
            self._waiting.remove(ready[0])  # a rejected turn is over, too
            self._send(ready[0])

    def _is_over(self, before: int) -> bool:
        return before < 0 or bool(self._table["status"][before] != UNFINISHED)

    def _send(self, request: Request) -> None:
        before, table = self._before[request.index], self._table
        if before >= 0:  # a rejected turn ended as it was sent
            end = float(np.fmax(table["finish"][before], table["arrival"][before]))
            request = replace(request, arrival=max(request.arrival, end))
        if not self._underway.delays(request):
            self._submit(request)

    def _arrive(self, request: Request) -> None:
        self._submit(request)
        self._send_due()


class ClosedLoop:
    """Workers that share the trace as a queue: each sends its next request when its last ends."""

    foresees = False

    def __init__(self, env: Clock, trace: Trace, submit: Submit, workers: int, frontend: float = 0.0) -> None:
        self._env, self._trace, self._submit, self._workers = env, trace, submit, workers
        self._underway = Underway(env, frontend, self._arrive)
        self._taken = 0

    def start(self) -> None:
        self.ended(self._workers)

    def next_time(self, turn: int, every: int) -> float:
        return self._underway.next_time

    def ended(self, count: int) -> None:
        while count and self._taken < len(self._trace):
            request = replace(self._trace.request(self._taken), arrival=self._env.now)
            self._taken += 1
            if self._underway.delays(request) or self._submit(request):  # a rejected request ends at once
                count -= 1

    @property
    def exhausted(self) -> bool:
        return self._taken == len(self._trace) and not self._underway

    def _arrive(self, request: Request) -> None:
        if not self._submit(request):
            self.ended(1)


Source = OpenLoop | Sessions | ClosedLoop
