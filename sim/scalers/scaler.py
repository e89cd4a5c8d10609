"""A scaler: it decides how many replicas each pool of a fleet should have."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class PoolView(NamedTuple):
    """A pool as an operator sees it: counts at the tick, and two totals since the last tick."""

    name: str
    ready: int  # replicas that take requests
    starting: int  # replicas that do not take requests yet
    draining: int  # replicas that end once they are idle
    waiting: int  # requests in the queues of the ready replicas
    running: int  # requests admitted by them and not finished
    tokens: int  # to prefill or expected to be returned: answers count with their estimated length
    pages_held: int  # KV pages that their sequences hold
    num_pages: int  # KV pages of their pools
    submitted: int  # requests sent to the pool since the last tick
    completed: int  # requests that the pool completed since the last tick


@dataclass(frozen=True)
class Scaler:
    """Decides the number of replicas of each pool, at ticks. The fields of a subclass are its settings.

    A run makes a copy of its own with `begin`, so `targets` may keep state.
    """

    every: float = 15.0  # s between ticks

    def begin(self) -> "Scaler":
        """A scaler for one run; one that keeps state returns a new object."""
        return self

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        """Return the replicas that each pool should have, at least one in all."""
        raise NotImplementedError
