"""llm-d's workload-variant autoscaler 2: `--scaler ./examples/scalers/wva_v2.py:WvaV2,most=12`.

It compares the tokens in demand with the tokens that a replica holds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import nan

from dsim.fleet import PolicyError, PoolView, Scaler, Wishes


@dataclass(frozen=True)
class WvaV2(Scaler):
    """Adds replicas until demand is 85 % of what they hold; removes them while it is below 70 %.

    A replica holds min(k1, k2) tokens: 80 % of its KV, and what it computes at once. k2 is the tokens held by a replica
    with `queue` queued requests; before one is seen, its most rows of a mean request. HPA carries the wish out after
    `window` s without a contrary one.
    """

    every: float = 30.0  # s between decisions
    kv: float = 0.8  # share of the KV tokens
    queue: int = 5  # requests that wait at a saturated replica
    up: float = 0.85  # share of the tokens held at which replicas are added
    down: float = 0.7  # ... removed
    least: int = 1  # replicas of a pool
    most: int = 64  # replicas of a pool
    window: float = 240.0  # s
    _seen: dict[str, float] = field(default_factory=dict, repr=False, compare=False)  # k2 of a pool
    _lengths: dict[str, float] = field(default_factory=dict, repr=False, compare=False)  # tokens of a request
    _wishes: dict[str, Wishes] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("kv", "up", "down"):
            if not 0 < getattr(self, name) <= 1:
                raise PolicyError(f"{name} is {getattr(self, name)}, expected above 0 and at most 1")
        if not 1 <= self.least <= self.most:
            raise PolicyError(f"least is {self.least} and most is {self.most}, expected 1 <= least <= most")

    def begin(self) -> "WvaV2":
        return replace(self, _seen={}, _lengths={}, _wishes={})

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        return [self._target(now, pool) for pool in pools]

    def _target(self, now: float, pool: PoolView) -> int:
        has, holds = pool.ready + pool.starting, self._holds(pool)
        if holds != holds:
            return max(has, self.least)  # the length of requests is unknown
        prompt = pool.queued_tokens / pool.waiting if pool.waiting else 0.0
        demand = float(pool.loads.kv_tokens.sum()) + pool.waiting * prompt
        required = max(0.0, demand / self.up - has * holds)
        spare = max(0.0, pool.ready * holds - demand / self.down)
        wish = has + math.ceil(required / holds) if required else has - math.floor(spare / holds)
        wishes = self._wishes.setdefault(pool.name, Wishes(self.window, self.window))
        return wishes.settle(now, min(max(wish, self.least), self.most), has)

    def _holds(self, pool: PoolView) -> float:
        """min(k1, k2); NaN: k2 is unknown."""
        loads = pool.loads
        saturated = loads.kv_tokens[(loads.waiting >= self.queue) & (loads.kv_tokens > 0)]
        if len(saturated):
            self._seen[pool.name] = float(saturated.mean())
        if pool.submitted:
            self._lengths[pool.name] = pool.input_length + pool.expected_length / 2
        computed = self._seen.get(pool.name, pool.max_batch * self._lengths.get(pool.name, nan))
        known = self.kv * pool.num_pages / max(1, pool.ready) * pool.page_size
        return min(known, computed) if computed == computed else computed
