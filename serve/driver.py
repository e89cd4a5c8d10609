"""The server's driver: a thread runs what a replica's engine plans, in real time, and tells of what it emits."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..engine.engine import Engine
from ..engine.journal import StepRecorder
from ..engine.request import Request
from ..engine.step import StepOutcome, StepPlan
from ..live.loop import Executor
from ..sim.step_model import StepModel

Clock = Callable[[], float]
Told = Callable[[StepPlan, npt.NDArray[np.int32]], None]  # a committed step, and the requests that ended with it


class PacedTwin:
    """The twin as an executor: a step lasts as long as the profile predicts, `speed` times as fast."""

    def __init__(self, model: StepModel, clock: Clock, speed: float = 1.0) -> None:
        self._model = model
        self._clock = clock
        self._speed = speed

    def step(self, plan: StepPlan) -> StepOutcome:
        """Sleep until the step is over: planning it took some of its time."""
        outcome = self._model.step(plan)
        time.sleep(max(0.0, plan.now + outcome.latency / self._speed - self._clock()))
        return outcome


class Replica:
    """One engine, its executor and the thread that drives them; submit, cancel and stop are for other threads."""

    def __init__(
        self, engine: Engine, executor: Executor, clock: Clock, told: Told, ended: Callable[[], None],
        recorder: StepRecorder | None = None,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.failure: Exception | None = None
        self._executor = executor
        self._clock = clock
        self._told = told
        self._ended = ended
        self._recorder = recorder
        self._inbox: deque[Request] = deque()
        self._gone: list[int] = []
        self._news = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"replica-{engine.replica}", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._inbox) + self.engine.num_waiting

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive() and not self._stopping

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand over a request that fits; requests come in order of arrival and of index."""
        with self._news:
            self._inbox.append(request)
            self._news.notify()

    def cancel(self, request: int) -> None:
        """Nobody waits for this request any more."""
        with self._news:
            self._gone.append(request)
            self._news.notify()

    def stop(self) -> None:
        """End after the step in flight; what is unfinished stays so."""
        with self._news:
            self._stopping = True
            self._news.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # what is done is not lost: the server writes its journal, then says this
            self.failure = error
        if self._recorder is not None:
            self._recorder.flush()
        self._ended()

    def _serve(self) -> None:
        engine, now = self.engine, self._clock()
        while not self._stopping:
            while self._inbox and self._inbox[0].arrival <= now:
                engine.submit(self._inbox.popleft())
            self._cancel(now)
            plan = engine.schedule(now)
            if plan is None:
                with self._news:
                    self._news.wait_for(lambda: self._inbox or self._gone or self._stopping)
                now = max(now, self._clock())
                continue
            outcome = self._executor.step(plan)
            outcome = replace(outcome, latency=max(0.0, self._clock() - now))
            now += outcome.latency  # the step's own end, as the journal has it
            done = engine.commit(outcome, now)
            if self._recorder is not None:
                self._recorder.record(engine.replica, plan, outcome, done)
            self._told(plan, done)

    def _cancel(self, now: float) -> None:
        """Take requests whose clients have gone off the engine; those that have not reached it are kept for later."""
        with self._news:
            gone, self._gone = self._gone, []
            coming = {request.index for request in self._inbox}
        for request in gone:
            if request in coming:
                self.cancel(request)
            else:
                self.engine.cancel(request, now)
