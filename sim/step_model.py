"""The step model: what a plan would cost and yield, predicted from a profile."""

import numpy as np

from ..engine.commits import CommitDraws, ScheduledCommits
from ..engine.latency import LatencyModel
from ..engine.leap import NO_DRAWS, cost_of
from ..engine.step import StepOutcome, StepPlan, features_left


class StepModel:
    """Predicts a step's outcome. Without draws, as for an autoregressive model, every computed position commits."""

    def __init__(self, latency: LatencyModel, draws: CommitDraws | ScheduledCommits | None) -> None:
        self.latency = latency
        self.draws = draws
        self.cost = cost_of(latency)
        self.arrays = NO_DRAWS if draws is None else draws.arrays

    def step(self, plan: StepPlan) -> StepOutcome:
        """The predicted outcome of a plan."""
        if plan.evicting is not None:
            assert isinstance(self.draws, CommitDraws)
            retained, committed = self.draws.draw_evicting(plan)
            latency = self.latency.step(plan.features, features_left(plan, retained))
            return StepOutcome(latency, committed, retained=retained)
        committed = np.ones_like(plan.window) if self.draws is None else self.draws.draw(plan)
        return StepOutcome(self.latency.step(plan.features), committed)
