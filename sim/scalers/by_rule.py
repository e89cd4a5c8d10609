"""A scaler's rule, asked for each pool at each tick."""

from collections.abc import Sequence
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt

from ...engine.fleet_rules import pool_target, replicas_wanted
from ...engine.two_levels import TwoLevels, settings_of
from . import Scaling
from .scaler import ROLES, PoolView, ReplicaLoads


class ByRule:
    """Asks a scaler's rule `pool_target` in place of `Scaler.targets`; num_requests: as of TwoLevels."""

    def __init__(self, scaling: Scaling, num_requests: int) -> None:
        kind = type(scaling.scaler)
        self._rule = TwoLevels(replicas_wanted, pool_target, kind.pool_target, f"scaler {scaling.spec}", num_requests)
        self._settings = settings_of(scaling.scaler)
        self._remembers = kind.remembers
        self._memories: dict[str, npt.NDArray[np.float64]] = {}  # by pool

    def targets(self, now: float, pools: Sequence[PoolView]) -> list[int]:
        """As Scaler.targets; PolicyError if the rule cannot be compiled."""
        found = []
        for place, pool in enumerate(pools):
            memory = self._memories.setdefault(pool.name, np.zeros(self._remembers))
            found.append(int(self._rule(np.float64(now), _in_numbers(place, pool), memory, self._settings)))
        return found


def _in_numbers(place: int, pool: PoolView) -> Any:
    """The view in numbers, which NumPy divides by 0 as compiled code does; see `pool_target` for name and role."""
    values: dict[str, Any] = pool._asdict() | {"name": place, "role": ROLES.index(pool.role)}
    loads = ReplicaLoads(*map(np.ascontiguousarray, values.pop("loads")))
    numbers: dict[str, Any] = {
        name: np.float64(value) if _KINDS[name] is float else np.int64(value) for name, value in values.items()
    }
    return PoolView(**numbers, loads=loads)


_KINDS = get_type_hints(PoolView)
