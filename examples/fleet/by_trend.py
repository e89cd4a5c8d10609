"""A compiled scaler with state: `--scaler examples/fleet/by_trend.py:SCALER,tokens=20000`."""

from dataclasses import dataclass
from typing import Any

from dsim.fleet import Scaler, rule


@rule
def by_trend(now: float, pool: Any, memory: Any, settings: Any) -> int:
    """A replica for each `tokens` of work, and for those that will have come after `ahead` seconds at this growth."""
    growth = (pool.tokens - memory[0]) / (now - memory[1]) if now > memory[1] else 0.0
    memory[0] = pool.tokens
    memory[1] = now
    work = pool.tokens + max(0.0, growth) * settings.ahead
    return int(min(settings.most, 1 + work // settings.tokens))


@dataclass(frozen=True)
class ByTrend(Scaler):
    """Starts replicas before the work is there."""

    every: float = 10.0  # s between decisions
    tokens: int = 30_000  # of work that a replica should have
    ahead: float = 30.0  # s, a replica's start-up
    most: int = 16
    pool_target = by_trend
    remembers = 2  # tokens and time of the last tick


SCALER = ByTrend
