"""One engine behind a server, with the thread that drives it in real time and takes messages."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.engine import Engine
from ..engine.journal import StepRecorder
from ..engine.loop import Executor, serve
from ..engine.request import Request
from ..engine.step import StepOutcome, StepPlan
from .real_time import Clock

Ids = npt.NDArray[np.int32]
Committed = Callable[[StepPlan, StepOutcome, Ids, float], None]  # step, requests that it ended, end


@dataclass(eq=False)
class Replica:
    """Its thread calls `committed` after each step, and `ended` when it stops; `failure` is then set on an error.

    simulates: time follows the executor's latencies. entering: a lock, held from setting a request's arrival until
    `submit` returns.
    """

    engine: Engine
    executor: Executor
    clock: Clock
    committed: Committed
    ended: Callable[[], None]
    recorder: StepRecorder | None = None
    _: KW_ONLY
    simulates: bool = False
    entering: Any = field(default_factory=threading.Lock)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self._stopped = self._busy = False
        self._now = 0.0  # s, of the last plan
        # New requests and when they reach the engine, indices of cancelled ones.
        self._notes: deque[tuple[float, Request] | int] = deque()
        self._num_sent = self._num_taken = 0  # requests
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"replica-{self.engine.replica}", daemon=True)

    @property
    def time(self) -> float:
        """s of its state: behind the clock during a step or on a slow machine."""
        now = self.clock()
        if not self.simulates:
            return now
        return min(now, self._now) if self._busy else min([now, *(due for due, _ in self._requests()[:1])])

    @property
    def num_queued(self) -> int:
        """Requests that had arrived by `time` and have not begun."""
        if not self.simulates:
            return self._num_sent - self._num_taken + self.engine.num_waiting
        now = self.time
        return self.engine.num_waiting + sum(due < now for due, _ in self._requests())

    def _requests(self) -> list[tuple[float, Request]]:
        return [note for note in self._notes.copy() if isinstance(note, tuple)]

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopped

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, due: float) -> None:
        """The request must fit; the engine sees it at `due` (s).

        All calls come from one thread, in order of arrival, index and `due`.
        """
        self._num_sent += 1
        self._notes.append((due, request))
        self._news.set()

    def cancel(self, request: int) -> None:
        self._notes.append(request)
        self._news.set()

    def stop(self) -> None:
        """Stop after the current step and those left of ended requests' rows; other requests stay unfinished."""
        self._end()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def deliver(self, now: float) -> bool:
        """Pass the engine what arrived by `now`; False: stop."""
        # Rows planned before their requests ended still run.
        has_ended_rows = not (self.engine.idle or self.engine.num_running or self.engine.num_waiting)
        if self._stopped and not has_ended_rows:
            return False
        self._news.clear()
        self._now, self._busy = now, True
        with self.entering:  # every arrival by now is in the notes
            pass
        while self._notes:
            first = self._notes[0]
            if isinstance(first, int):
                self.engine.cancel(first, now)
            elif first[0] <= now:
                self.engine.submit(first[1])
                self._num_taken += 1
            else:
                break
            self._notes.popleft()
        return True

    def _wait(self, now: float) -> float | None:
        """Wait for something to deliver; its time, or None to stop."""
        if self._stopped:
            return None
        self._busy = False
        if not self._notes:
            self._news.wait()
        elif isinstance(first := self._notes[0], tuple) and first[0] > self.clock():
            self._news.wait(self.clock.real(first[0] - self.clock()))
        later = self.clock()
        if self.simulates and self._notes and isinstance(first := self._notes[0], tuple):
            later = min(later, first[0])  # this thread woke up late; simulated time does not
        return max(now, later)

    def _on_step(self, plan: StepPlan, outcome: StepOutcome, done: Ids, now: float) -> None:
        if self.recorder is not None:
            self.recorder.record(self.engine.replica, plan, outcome, done)
        self.committed(plan, outcome, done, now)

    def _end(self) -> None:
        self._stopped = True
        self._news.set()

    def _run(self) -> None:
        try:
            serve(
                self.engine,
                self.executor.step,
                deliver=self.deliver,
                wait=self._wait,
                on_step=self._on_step,
                clock=None if self.simulates else self.clock,
                now=self.clock(),
            )
        except Exception as error:  # the server writes its journal, then reports this
            self.failure = error
        self._end()
        self.ended()  # before the journal: clients do not wait for the disk
        try:
            if self.recorder is not None:
                self.recorder.flush()  # after a failed step as well: of those before it
        except Exception as error:
            self.failure = self.failure or error
