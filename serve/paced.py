"""The twin as an executor in real time."""

import time
from collections.abc import Callable

from ..engine.step import StepOutcome, StepPlan
from ..sim.step_model import StepModel


class PacedTwin:
    """An executor whose steps last as long as the profile predicts, `speed` times as fast."""

    def __init__(self, model: StepModel, clock: Callable[[], float], speed: float = 1.0) -> None:
        self._model = model
        self._clock = clock
        self._speed = speed

    def step(self, plan: StepPlan) -> StepOutcome:
        """Sleep until the step is over: planning it took some of its time."""
        outcome = self._model.step(plan)
        time.sleep(max(0.0, plan.now + outcome.latency / self._speed - self._clock()))
        return outcome
