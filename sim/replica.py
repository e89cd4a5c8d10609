"""A replica in simulated time: the engine decides, the step model predicts, SimPy advances the time."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from ..engine.engine import Engine
from ..engine.journal import StepRecorder
from ..engine.request import Request
from .clock import Clock
from .step_model import StepModel


@dataclass(frozen=True, eq=False)
class Timeline:
    """What the replicas of a pool share: the clock, the price of steps, and what is told of their results."""

    env: Clock
    step_model: StepModel
    recorder: StepRecorder | None
    finished: Callable[[int, float], None]  # gets the number of requests that ended, and the time
    horizon: Callable[[int], float]  # s, when an outside event may first change the replica of a number
    until_finish: bool = False  # call `finished` as each request ends, for closed loops


class Replica:
    """An engine and its process, which runs to the next outside event and sleeps while idle."""

    def __init__(self, timeline: Timeline, engine: Engine) -> None:
        self.env = timeline.env
        self.engine = engine
        self.stopped: simpy.Event = self.env.event()  # after `drain`, when its last request has ended
        self._timeline = timeline
        self._arrival = self.env.event()
        self._asleep = False
        self._draining = False
        self._done = 0  # requests reported as finished
        self.env.process(self._run())

    @property
    def awaits(self) -> bool:
        """Whether requests are on their way to or from it."""
        return False

    def after_step(self) -> None:
        """Called whenever it has run."""

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

    def _run(self) -> Generator[simpy.Event, Any, None]:
        line, engine = self._timeline, self.engine
        env, model = self.env, line.step_model
        while True:
            until = engine.run(
                env.now,
                line.horizon(engine.replica),
                model.arrays,
                model.cost,
                line.recorder,
                until_finish=line.until_finish,
            )
            if until > env.now:
                yield env.at(until)
            self.after_step()
            completed = engine.num_completed
            if completed > self._done:
                line.finished(completed - self._done, env.now)
                self._done = completed
            if engine.idle or engine.blocked:
                if self._draining and engine.idle and not self.awaits:
                    self.stopped.succeed()
                    return
                self._asleep = True
                self._arrival = env.event()
                yield self._arrival
