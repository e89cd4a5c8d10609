"""A stub executor: no model, no device. It sleeps for the predicted time and commits by the profile's keyed draws."""

import time
from collections.abc import Callable

import numpy as np

from dsim.engine.commits import CommitDraws
from dsim.engine.latency import LatencyModel
from dsim.engine.step import StepOutcome, StepPlan, features_left


class StubExecutor:
    """Stands in for a device behind the live driver: the latency it reports is the time it took."""

    def __init__(
        self,
        latency: LatencyModel,
        draws: CommitDraws | None,
        *,
        time_scale: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._latency = latency
        self._draws = draws  # None: autoregressive, every computed position commits
        self._time_scale = time_scale  # real seconds a predicted second takes
        self._clock = clock
        self._sleep = sleep

    def step(self, plan: StepPlan) -> StepOutcome:
        """Sleep through a plan."""
        begin = self._clock()
        retained = left = None
        if self._draws is None:
            committed = np.ones_like(plan.window)
        elif plan.evicting is None:
            committed = self._draws.draw(plan)
        else:
            retained, committed = self._draws.draw_evicting(plan)
            left = features_left(plan, retained)
        self._sleep(self._time_scale * self._latency.step(plan.features, left, plan.first))
        return StepOutcome(self._clock() - begin, committed, retained=retained)
