"""The step model: what steps cost and commit by a profile.

Replays run `core.predict` with its `cost` and `arrays`; `step` is the same in NumPy, for engines driven step by step.
"""

from ..engine import cache_overhead
from ..engine.commits import NO_DRAWS, CommitDraws, Commits
from ..engine.errors import ProfileError
from ..engine.latency import LatencyModel
from ..engine.part import Cache
from ..engine.state import Draws
from ..engine.step import StepOutcome, StepPlan, features_left


class StepModel:
    """Predicts a step's outcome; without draws every computed position commits.

    cache: the policy's, whose overhead the latency model may know; ProfileError if its first layer is charged apart and
    the model has no layers. hides_host: steps are decided ahead.
    """

    def __init__(
        self, latency: LatencyModel, draws: Commits | None, cache: Cache | None = None, hides_host: bool = False
    ) -> None:
        if cache is not None and cache.first_layer_whole and not latency.layers:
            raise ProfileError(
                "first_layer_whole is true and the latency model has 0 layers: expected a profile's, or "
                "first_layer_whole=false"
            )
        if not hides_host:
            latency = latency.exposed()
        self.latency = latency
        self.cache_overhead = cache_overhead.table_of(latency, cache)
        self.draws = draws
        self.cost = latency.arrays(self.cache_overhead)
        self.arrays: Draws | tuple[Draws, ...] = NO_DRAWS
        if isinstance(draws, CommitDraws):
            self.arrays = draws.of_run
        elif draws is not None:
            self.arrays = draws.arrays

    def step(self, plan: StepPlan) -> StepOutcome:
        if plan.evicting is not None:
            assert isinstance(self.draws, CommitDraws)
            retained, committed = self.draws.draw_evicting(plan)
            latency = cache_overhead.price_of_plan(
                self.latency, self.cache_overhead, plan, features_left(plan, retained)
            )
            return StepOutcome(latency, committed, retained=retained)
        committed = plan.window.copy()
        if self.draws is not None:
            committed = self.draws.draw(plan)
        latency = cache_overhead.price_of_plan(self.latency, self.cache_overhead, plan)
        return StepOutcome(latency, committed)
