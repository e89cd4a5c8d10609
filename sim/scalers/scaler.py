"""A scaler: it decides how many replicas each pool of a fleet should have."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_NONE = np.zeros(0)


class ReplicaLoads(NamedTuple):
    """The ready replicas of a pool, [ready] each. Means are over the steps since the last tick; NaN without steps."""

    waiting: npt.NDArray[np.float64] = _NONE  # requests in its queue
    queued_tokens: npt.NDArray[np.float64] = _NONE  # prompt tokens of these
    kv_tokens: npt.NDArray[np.float64] = _NONE  # tokens in KV pages that sequences hold
    steps: npt.NDArray[np.float64] = _NONE  # since the last tick
    step_time: npt.NDArray[np.float64] = _NONE  # s, mean
    step_prefill: npt.NDArray[np.float64] = _NONE  # prompt tokens of a step, mean
    step_kv: npt.NDArray[np.float64] = _NONE  # tokens in KV pages held during a step, mean
    step_rows: npt.NDArray[np.float64] = _NONE  # rows of a decode step, mean
    forwards: npt.NDArray[np.float64] = _NONE  # of sequences in decode steps, since the last tick


class PoolView(NamedTuple):
    """A pool as an operator sees it: counts at the tick, and totals and means since the last tick.

    A mean is NaN where there was nothing to average.
    """

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
    queued_tokens: int = 0  # prompt tokens of the requests that wait
    submitted_blocks: int = 0  # blocks that the requests sent since the last tick are expected to decode
    waiting_blocks: int = 0  # ... of waiting requests
    running_blocks: int = 0  # ... of running requests
    input_length: float = nan  # mean prompt tokens of the requests sent since the last tick
    expected_length: float = nan  # ... mean tokens of their answers, estimated
    output_length: float = nan  # mean tokens of the answers completed since the last tick
    ttft: float = nan  # s, mean of the first tokens since the last tick
    itl: float = nan  # s, mean time a token of the answers completed since the last tick, after their first tokens
    e2el: float = nan  # s, mean of the requests completed since the last tick
    hit_rate: float = nan  # share of prompt tokens found in a prefix cache; NaN: no cache, or nothing was looked up
    tokens_per_forward: float = nan  # tokens that a sequence commits in a forward, mean since the run began
    block_length: int = 1  # tokens that are decoded together
    page_size: int = 1  # tokens of a KV page
    max_batch: int = 1  # sequences that a replica runs at once
    max_prefill: int = 1  # prompt tokens of a step
    context_limit: int = 1  # tokens of a sequence
    gpus: int = 1  # of a replica
    role: str = "both"  # of its replicas: prefill, decode or both
    loads: ReplicaLoads = ReplicaLoads()

    @property
    def forwards_per_block(self) -> float:
        """Forwards that a block takes, mean since the run began; NaN before the first."""
        return self.block_length / self.tokens_per_forward


@dataclass(frozen=True)
class Scaler:
    """Decides the number of replicas of each pool, at ticks. The fields of a subclass are its settings.

    A run makes a copy with `begin`, so `targets` may keep state.
    """

    every: float = 15.0  # s between ticks

    def begin(self) -> "Scaler":
        """A scaler for one run; one that keeps state returns a new object."""
        return self

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        """Return the replicas that each pool should have, at least one in all."""
        raise NotImplementedError
