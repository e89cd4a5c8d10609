"""A scaler: one replica for each `tokens` of work that is queued or running."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsim.fleet import PoolView, Scaler


@dataclass(frozen=True)
class ByTokens(Scaler):
    """Follows the tokens still to prefill or expected to be returned, and never scales below `least`."""

    every: float = 10.0  # s between decisions
    tokens: int = 30_000  # of work that a replica should have
    least: int = 1
    most: int = 16

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        return [min(self.most, max(self.least, math.ceil(pool.tokens / self.tokens))) for pool in pools]


SCALER = ByTokens
