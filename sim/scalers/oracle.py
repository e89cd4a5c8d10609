"""The oracle knows the trace, each request's work and the start-up: an upper bound for scalers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import numpy.typing as npt

from ...engine.errors import PolicyError
from .scaler import PoolView, Scaler, check_range


@dataclass(frozen=True)
class Oracle(Scaler):
    """The fewest replicas that do each interval's work in time, started ahead; for one pool.

    Work is in seconds of a full replica, of whose time `load` is planned; at 1, queues form. Work is due `within`
    seconds after it came, at the end of that interval.
    """

    load: float = 0.8  # planned share of a full replica's time
    within: float = 5.0  # s
    least: int = 1  # replicas
    most: int = 64  # replicas
    _ahead: float = 0.0  # s of start-up
    _needed: tuple[int, ...] = ()  # replicas by interval

    def __post_init__(self) -> None:
        if not 0 < self.load <= 1:
            raise PolicyError(f"load is {self.load}, expected above 0 and at most 1")
        check_range(self.least, self.most)

    def knowing(self, arrival: npt.NDArray[np.float64], work: npt.NDArray[np.float64], startup: float) -> "Oracle":
        """The oracle of a trace; arrival [requests] s; work [requests] seconds of a full replica."""
        order = np.argsort(arrival, kind="stable")
        times, total = arrival[order], np.concatenate([[0.0], np.cumsum(work[order])])

        def come(until: float) -> float:
            """Work that came by a time."""
            return float(total[np.searchsorted(times, until, side="right")])

        needed, done, capacity = [], 0.0, self.every * self.load
        for k in count():
            end = (k + 1) * self.every
            due = come(end - self.within) - done
            replicas = min(max(self.least, math.ceil(due / capacity - 1e-9)), self.most)
            done = min(come(end), done + replicas * capacity)
            needed.append(replicas)
            if done >= total[-1] - 1e-9:
                break
        return replace(self, _needed=tuple(needed), _ahead=startup)

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        if len(pools) != 1:
            raise PolicyError(f"the oracle knows the replicas of one pool, and the fleet has {len(pools)} pools")
        if not self._needed:
            raise PolicyError("the oracle has no trace, expected requests with arrival times")
        first, last = math.floor(now / self.every + 1e-9), math.ceil((now + self._ahead) / self.every - 1e-9)
        # Keep a replica needed again within its start-up: another would start at once.
        return [max(self._needed[first : last + 1], default=self.least)]
