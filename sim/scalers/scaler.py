"""A scaler decides how many replicas each pool should have."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

import numpy as np

from ...engine.errors import PolicyError
from ...traces.trace import Floats

_NONE = np.zeros(0)


class ReplicaLoads(NamedTuple):
    """A pool's ready replicas, [ready]; means are over the steps since the last tick, NaN without any."""

    waiting: Floats = _NONE  # requests in its queue
    steps: Floats = _NONE  # since the last tick
    step_time: Floats = _NONE  # s, mean
    step_rows: Floats = _NONE  # rows of a decode step, mean
    forwards: Floats = _NONE  # of sequences in decode steps, since the last tick


class PoolView(NamedTuple):
    """A pool as an operator sees it: counts at the tick, totals and means since the last; NaN: nothing to average."""

    name: str
    ready: int  # replicas that take requests
    starting: int  # replicas that do not yet
    draining: int  # replicas that end once idle
    waiting: int  # requests queued at ready replicas
    running: int  # requests admitted there and not finished
    tokens: int  # to prefill or expected to be returned, by estimated lengths
    pages_held: int  # KV pages that their sequences hold
    num_pages: int  # KV pages of their pools
    submitted: int  # requests sent since the last tick
    completed: int  # requests completed since the last tick
    queued_tokens: int = 0  # prompt tokens of waiting requests
    submitted_blocks: int = 0  # expected blocks of requests sent since the last tick
    waiting_blocks: int = 0  # ... of waiting requests
    running_blocks: int = 0  # ... of running requests
    ttft: float = nan  # s, mean of first tokens since the last tick
    itl: float = nan  # s a token after the first, mean of answers completed since the last tick
    e2el: float = nan  # s, mean of requests completed since the last tick
    tokens_per_forward: float = nan  # that a sequence commits, mean since the run began
    block_length: int = 1  # tokens decoded together
    max_batch: int = 1  # sequences of a replica at once
    role: str = "both"  # or prefill, decode
    loads: ReplicaLoads = ReplicaLoads()

    @property
    def forwards_per_block(self) -> float:
        """Forwards a block, mean since the run began; NaN before the first."""
        return self.block_length / self.tokens_per_forward


@dataclass(frozen=True)
class Scaler:
    """Decides each pool's replicas at ticks; a subclass's fields are its settings.

    A run makes a copy with `begin`: `targets` may keep state.
    """

    every: float = 15.0  # s between ticks

    def begin(self) -> "Scaler":
        """A scaler for one run; a new object if it keeps state."""
        return self

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        """The replicas of each pool, at least one in all."""
        raise NotImplementedError("it has no method targets")


def check_range(least: int, limit: int) -> None:
    """PolicyError unless a pool may have these numbers of replicas."""
    if not 1 <= least <= limit:
        raise PolicyError(f"least is {least} and most is {limit}, expected 1 <= least <= most")
