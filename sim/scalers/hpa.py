"""Kubernetes' Horizontal Pod Autoscaler: replicas that bring a metric's mean to its target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...engine.errors import PolicyError, quoted
from .scaler import PoolView, Scaler, check_range
from .wishes import Wishes

METRICS = ("requests", "waiting", "running", "tokens", "kv")


@dataclass(frozen=True)
class Hpa(Scaler):
    """ceil(replicas x value / target); value: the metric's mean over ready replicas.

    Kubernetes' defaults: 10 % tolerance; downwards it follows the highest wish of the last 300 s. The replicas at the
    first tick count as a wish (recordInitialRecommendation in horizontal.go): none is removed in the first 300 s.
    """

    metric: str = "requests"  # waiting and running; or waiting, running, tokens, kv (share of pages held)
    target: float = 8.0  # per replica
    least: int = 1  # replicas of a pool
    most: int = 64  # replicas of a pool
    tolerance: float = 0.1  # relative distance from the target without effect
    down_window: float = 300.0  # s
    _wishes: dict[int, Wishes] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise PolicyError(f"metric is {quoted(self.metric)}, expected one of {', '.join(METRICS)}")
        if not 0 < self.target < math.inf:
            raise PolicyError(f"target is {self.target}, expected above 0 and finite")
        check_range(self.least, self.most)

    def begin(self) -> "Hpa":
        return replace(self, _wishes={})

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        return [self._target(i, now, pool) for i, pool in enumerate(pools)]

    def _target(self, i: int, now: float, pool: PoolView) -> int:
        has = pool.ready + pool.starting
        if pool.ready == 0:
            return max(has, self.least)
        ratio = self._value(pool) / pool.ready / self.target
        wish = has
        if abs(ratio - 1) > self.tolerance:
            wish = math.ceil(pool.ready * ratio)
        wish = min(max(wish, self.least), self.most)
        return self._wishes.setdefault(i, Wishes(self.down_window, from_first=True)).settle(now, wish, has)

    def _value(self, pool: PoolView) -> float:
        if self.metric == "kv":
            return pool.ready * pool.pages_held / pool.num_pages
        if self.metric == "requests":
            return pool.waiting + pool.running
        return float(getattr(pool, self.metric))
