"""A replica in simulated time: the engine decides, the step model predicts, SimPy lets the time pass."""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from ..engine.engine import Engine
from ..engine.request import Request
from ..engine.step import StepOutcome, StepPlan
from .clock import Clock
from .step_model import StepModel

Record = Callable[[StepPlan, StepOutcome, npt.NDArray[np.int32]], None]
Finished = Callable[[npt.NDArray[np.int32], float], None]


class Replica:
    """One engine and its process."""

    def __init__(
        self,
        env: Clock,
        engine: Engine,
        step_model: StepModel,
        record: Record | None = None,
        finished: Finished | None = None,
    ) -> None:
        self.env = env
        self.engine = engine
        self.step_model = step_model
        self._record = record
        self._finished = finished
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
        env, engine = self.env, self.engine
        while True:
            plan = engine.schedule(env.now)
            if plan is None:
                self._asleep = True
                self._arrival = env.event()
                yield self._arrival
                continue
            outcome = self.step_model.step(plan)
            yield env.at(plan.now + outcome.latency)
            done = engine.commit(outcome, env.now)
            if self._record is not None:
                self._record(plan, outcome, done)
            if self._finished is not None and len(done):
                self._finished(done, env.now)
