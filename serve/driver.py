"""The server's driver: it runs what an engine plans, in real time, for requests that come from other threads."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..engine.engine import Engine
from ..engine.journal import StepRecorder
from ..engine.request import Request
from ..engine.step import StepPlan
from ..live.loop import Executor

Clock = Callable[[], float]
Told = Callable[[StepPlan, npt.NDArray[np.int32]], None]  # a committed step, and the requests that ended with it


class Inbox:
    """What one other thread tells a driver: who comes, who has gone, and when to stop."""

    def __init__(self) -> None:
        self.stopped = False
        self._notes: deque[Request | int] = deque()  # a request that comes, the index of one whose client has gone
        self._num_sent = self._num_taken = 0  # requests
        self._news = threading.Event()

    @property
    def num_requests(self) -> int:
        """Requests that the engine has not been given."""
        return self._num_sent - self._num_taken

    def submit(self, request: Request) -> None:
        """Hand over a request that fits; requests come in order of arrival and of index."""
        self._num_sent += 1
        self._notes.append(request)
        self._news.set()

    def cancel(self, request: int) -> None:
        """Nobody waits for this request any more."""
        self._notes.append(request)
        self._news.set()

    def stop(self) -> None:
        """End after the step in flight; what is unfinished stays so."""
        self.stopped = True
        self._news.set()

    def deliver(self, engine: Engine, now: float) -> None:
        """Tell an engine what has come by `now`, in order."""
        self._news.clear()
        while self._notes:
            first = self._notes[0]
            if isinstance(first, int):
                engine.cancel(first, now)
            elif first.arrival <= now:
                engine.submit(first)
                self._num_taken += 1
            else:
                break
            self._notes.popleft()

    def wait(self) -> None:
        """Return when there is something that was not delivered."""
        if not self._notes and not self.stopped:
            self._news.wait()


def drive(
    engine: Engine, executor: Executor, inbox: Inbox, clock: Clock, told: Told, recorder: StepRecorder | None = None
) -> None:
    """Serve until the inbox says stop. A step begins where the last one ended, or when an idle engine has news."""
    now = clock()
    while not inbox.stopped:
        inbox.deliver(engine, now)
        plan = engine.schedule(now)
        if plan is None:
            inbox.wait()
            now = max(now, clock())
            continue
        outcome = executor.step(plan)
        outcome = replace(outcome, latency=max(0.0, clock() - now))
        now += outcome.latency  # the step's own end, as the journal has it
        done = engine.commit(outcome, now)
        if recorder is not None:
            recorder.record(engine.replica, plan, outcome, done)
        told(plan, done)
