"""A replica in simulated time: the engine decides, the step model predicts, SimPy advances the time."""

from collections.abc import Callable, Generator
from typing import Any

import simpy

from ..engine.engine import Engine
from ..engine.journal import StepRecorder
from ..engine.request import Request
from .clock import Clock
from .step_model import StepModel

Finished = Callable[[int, float], None]
Horizon = Callable[[], float]  # when the outside may first affect this replica


class Replica:
    """An engine and its process, which runs to the next outside event and sleeps while idle.

    until_finish: call `finished` as each request ends, for closed loops.
    """

    def __init__(
        self,
        env: Clock,
        engine: Engine,
        step_model: StepModel,
        recorder: StepRecorder | None,
        finished: Finished,
        horizon: Horizon,
        until_finish: bool = False,
    ) -> None:
        self.env = env
        self.engine = engine
        self.step_model = step_model
        self.stopped: simpy.Event = env.event()  # after `drain`, when its last request has ended
        self._recorder = recorder
        self._finished = finished
        self._horizon = horizon
        self._until_finish = until_finish
        self._arrival = env.event()
        self._asleep = False
        self._draining = False
        self.watch: Callable[[], None] | None = None  # called between steps
        self.awaited: Callable[[], bool] = lambda: False  # requests are on their way to or from it
        self._done = 0  # requests reported as finished

    def begin(self) -> None:
        """Start the process that runs it."""
        self.env.process(self._run())

    def submit(self, request: Request) -> bool:
        """Hand the engine a request and wake it; False if it can never fit."""
        accepted = self.engine.submit(request)
        # A request without pages changes nothing.
        if not self.engine.blocked or request.arrived:
            self.wake()
        return accepted

    def drain(self) -> None:
        """End after its last request; only requests on their way may come."""
        self._draining = True
        self.wake()

    def wake(self) -> None:
        """Ask a sleeping engine again."""
        if self._asleep:
            self._asleep = False
            self._arrival.succeed()

    def advance(self, now: float, horizon: float) -> float:
        """Run the engine (Engine.run); when to call again (s)."""
        model = self.step_model
        return self.engine.run(now, horizon, model.arrays, model.cost, self._recorder, self._until_finish)

    def report(self) -> None:
        """Report the requests that have finished."""
        completed = self.engine.num_completed
        if completed > self._done:
            self._finished(completed - self._done, self.env.now)
            self._done = completed

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env, engine = self.env, self.engine
        while True:
            until = self.advance(env.now, self._horizon())
            if until > env.now:
                yield env.at(until)
            if self.watch is not None:
                self.watch()
            self.report()
            if engine.idle or engine.blocked:
                if self._draining and engine.idle and not self.awaited():
                    self.stopped.succeed()
                    return
                self._asleep = True
                self._arrival = env.event()
                yield self._arrival
