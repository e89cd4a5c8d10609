"""Ours: the forwards that requests still need, over a full replica's forwards/s.

Models of blocks work in forwards: blocks left times forwards per block. Tokens, KV use and latencies say less: tokens
come by block, and a cap on rows keeps KV use low while the queue grows.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import nan

import numpy as np

from ...engine.errors import PolicyError
from .scaler import PoolView, Scaler, check_range
from .wishes import Wishes

MOST_SAMPLES = 256
LEAST_SAMPLES = 5


@dataclass(frozen=True)
class QueuedForwards(Scaler):
    """ceil((forwards arriving per second + waiting forwards / drain) / (load x a full replica's forwards/s)).

    A replica's rate is learnt from busy seconds per forward, a + b / rows; with too few samples a pool stays.
    """

    drain: float = 60.0  # s in which to admit waiting requests: a shorter queue is gone before a start
    load: float = 0.8  # planned share of a full replica's rate
    window: float = 60.0  # s to average arrivals over
    least: int = 1  # replicas of a pool
    most: int = 64  # replicas of a pool
    down_window: float = 900.0  # s before a lower wish counts
    _pools: dict[str, "_History"] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("drain", "load", "window"):
            if not 0 < getattr(self, name) < math.inf:
                raise PolicyError(f"{name} is {getattr(self, name)}, expected above 0 and finite")
        check_range(self.least, self.most)

    def begin(self) -> "QueuedForwards":
        return replace(self, _pools={})

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        return [self._target(now, pool) for pool in pools]

    def _target(self, now: float, pool: PoolView) -> int:
        ticks = max(1, round(self.window / self.every))
        history = self._pools.setdefault(pool.name, _History(deque(maxlen=ticks), Wishes(self.down_window)))
        history.observe(pool)
        rate = history.rate(pool.max_batch) * self.load
        has, forwards = pool.ready + pool.starting, pool.forwards_per_block
        if not rate > 0 or forwards != forwards:
            return max(has, self.least)
        arriving = sum(history.blocks) / (len(history.blocks) * self.every)
        wish = math.ceil((arriving + pool.waiting_blocks / self.drain) * forwards / rate)
        return history.wishes.settle(now, min(max(wish, self.least), self.most), has)


@dataclass
class _History:
    """A pool's last ticks."""

    blocks: deque[int]  # sent in each of the last ticks
    wishes: Wishes
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))  # 1 / rows, busy s

    def observe(self, pool: PoolView) -> None:
        self.blocks.append(pool.submitted_blocks)
        loads = pool.loads
        for i in np.flatnonzero(loads.forwards > 0):
            busy = float(loads.steps[i] * loads.step_time[i] / loads.forwards[i])
            self.samples.append((1.0 / float(loads.step_rows[i]), busy))

    def rate(self, rows: int) -> float:
        """Forwards a second of a replica with `rows` sequences; NaN: too few samples."""
        if len(self.samples) < LEAST_SAMPLES:
            return nan
        inverse, busy = np.array(self.samples).T
        spread = float(((inverse - inverse.mean()) ** 2).sum())
        a = 0.0
        if spread > 0:
            a = float(((inverse - inverse.mean()) * busy).sum()) / spread
        a = min(max(a, 0.0), float(busy.mean() / inverse.mean()))  # neither a nor b is negative
        return 1.0 / max(1e-9, float(busy.mean()) + a * (1.0 / rows - float(inverse.mean())))
