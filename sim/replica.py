"""A replica in simulated time: the engine decides, the step model predicts, SimPy lets the time pass."""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from ..engine.engine import Engine
from ..engine.journal import StepRecorder
from ..engine.request import Request
from .clock import Clock
from .step_model import StepModel

Finished = Callable[[npt.NDArray[np.int32], float], None]
Horizon = Callable[[], float]  # the first time at which the world outside may touch this replica


class Replica:
    """One engine and its process."""

    def __init__(
        self,
        env: Clock,
        engine: Engine,
        step_model: StepModel,
        recorder: StepRecorder | None = None,
        finished: Finished | None = None,
        horizon: Horizon | None = None,
        watched: bool = True,
    ) -> None:
        self.env = env
        self.engine = engine
        self.step_model = step_model
        self._recorder = recorder
        self._finished = finished
        self._horizon = horizon
        self._watched = watched
        self._arrival = env.event()
        self._asleep = False
        env.process(self._run())

    def submit(self, request: Request) -> bool:
        """Hand the engine a request now, and wake it if it slept; False if the request can never fit."""
        taken = self.engine.submit(request)
        if self._asleep:
            self._asleep = False
            self._arrival.succeed()
        return taken

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env, engine, model = self.env, self.engine, self.step_model
        while True:
            if self._horizon is not None:
                end, done = engine.leap(
                    env.now, self._horizon(), model.cost, model.arrays, self._recorder, self._watched
                )
                if end > env.now:
                    yield env.at(end)
                    self._report(done)
                    continue
            plan = engine.schedule(env.now)
            if plan is None:
                self._asleep = True
                self._arrival = env.event()
                yield self._arrival
                continue
            outcome = model.step(plan)
            yield env.at(plan.now + outcome.latency)
            done = engine.commit(outcome, env.now)
            if self._recorder is not None:
                self._recorder.record(engine.replica, plan, outcome, done)
            self._report(done)

    def _report(self, done: npt.NDArray[np.int32]) -> None:
        if self._finished is not None and len(done):
            self._finished(done, self.env.now)
