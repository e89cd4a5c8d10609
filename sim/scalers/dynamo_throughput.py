"""Dynamo's slow loop: the predicted load over a replica's capacity."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...engine.errors import PolicyError
from .dynamo_capacity import Work, capacity, within_budget
from .perf_model import PerfModel
from .predictors import Predictor, predictor
from .scaler import PoolView, Scaler


@dataclass(frozen=True)
class DynamoThroughput(Scaler):
    """ceil(predicted requests/s / a replica's), at most 8 up or down.

    A pool without step times keeps its number. Dynamo's default predictor is arima.
    """

    every: float = 180.0  # s between decisions
    ttft: float = 0.5  # s, the SLA
    itl: float = 0.05  # s, the SLA
    predictor: str = "kalman"  # constant, trend, kalman or arima
    least: int = 1  # replicas of a pool
    budget: int = 8  # GPUs of the fleet
    most_change: int = 8  # replicas per decision
    _models: dict[str, PerfModel] = field(default_factory=dict, repr=False, compare=False)
    _loads: dict[str, list[Predictor]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        predictor(self.predictor)
        check_slas(self.ttft, self.itl, self.least, self.budget)

    def begin(self) -> "DynamoThroughput":
        return replace(self, _models={}, _loads={})

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        for pool in pools:
            self._models.setdefault(pool.name, PerfModel()).observe(pool)
        return self.decide(pools)

    def decide(self, pools: Sequence[PoolView]) -> list[int]:
        """Targets by known step times."""
        return within_budget([self._target(pool) for pool in pools], pools, self.budget, self.least)

    def _target(self, pool: PoolView) -> int:
        if pool.name not in self._loads:
            self._loads[pool.name] = [predictor(self.predictor) for _ in range(4)]
        seen = (pool.submitted, pool.input_length, pool.output_length, pool.hit_rate)
        for known, value in zip(self._loads[pool.name], seen, strict=True):
            known.add(value)
        requests, prompt, answer, hits = (known.next() for known in self._loads[pool.name])
        has = pool.ready + pool.starting
        if not prompt or not answer:
            return max(has, self.least)
        work = Work(math.ceil(prompt), math.ceil(answer), hits)
        rps = capacity(self._models[pool.name], pool, work, self.ttft, self.itl)
        wish = math.ceil(requests / self.every / rps) if rps == rps else has
        return max(self.least, min(max(wish, has - self.most_change), has + self.most_change))


def check_slas(ttft: float, itl: float, least: int, budget: int) -> None:
    """PolicyError if a setting is out of range."""
    for name, value in (("ttft", ttft), ("itl", itl)):
        if not 0 < value < math.inf:
            raise PolicyError(f"{name} is {value} s, expected above 0 and finite")
    if not 1 <= least <= budget:
        raise PolicyError(f"least is {least} and budget is {budget}, expected 1 <= least <= budget")
