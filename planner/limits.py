"""What limits a replica: where its busy time goes at capacity, or which pool the waiting requests wait for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.engine import Limits
from ..engine.latency import LatencyModel

FULL = 0.9  # of the KV pool: requests that wait then wait for pages
WAITED = 0.25  # of the busy time with requests waiting for a pool: the pool limits
THRASH = 0.01  # preemptions a request

COMPUTE, KV_MEMORY, BATCH, PREFILL, HOST = "compute", "KV memory", "batch limit", "prefill", "host overhead"


@dataclass
class Shares:
    """Where the time in steps goes, summed over a run's steps. Times in seconds."""

    latency: LatencyModel
    limits: Limits
    busy: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys((COMPUTE, KV_MEMORY, BATCH, PREFILL, HOST), 0))

    def append(self, steps: Mapping[str, npt.NDArray[Any]], _lists: Mapping[str, Any]) -> None:
        """Count a batch of the journal's steps."""
        took, prefill = steps["latency"], steps["prefill"]
        # What a step takes beyond its work on the device: the launch floor where it binds, and the host's own terms.
        device = np.minimum(device_time(self.latency, steps), took)
        waiting = steps["waiting"] > 0
        full = steps["pages"] >= FULL * self.limits.num_pages
        crowded = (steps["running"] >= self.limits.max_batch) & ~full
        self.busy += float(took.sum())
        for name, amount in (
            (COMPUTE, device[~prefill]),
            (PREFILL, device[prefill]),
            (HOST, took - device),
            (KV_MEMORY, took[waiting & full]),
            (BATCH, took[waiting & crowded]),
        ):
            self.sums[name] += float(amount.sum())

    def shares(self) -> dict[str, float]:
        """Of the busy time: on the device in decode and in prefill, on the host, and waiting for pages or for a row."""
        return {name: total / self.busy if self.busy > 0 else 0.0 for name, total in self.sums.items()}


def limited_by(shares: Mapping[str, float], preemptions: float) -> str:
    """The resource that limits: a pool that requests wait for, or else where most of the busy time goes.

    preemptions: a request.
    """
    if shares[KV_MEMORY] > WAITED or preemptions > THRASH:
        return KV_MEMORY
    if shares[BATCH] > WAITED:
        return BATCH
    return max((COMPUTE, PREFILL, HOST), key=lambda name: shares[name])


def device_time(model: LatencyModel, steps: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    """The device's part of each step's latency (s): `LatencyModel.step` without launch and host terms."""
    n = np.maximum(steps["num_forwards"], 1)
    x = steps["tokens"] / n
    knots = np.array(model.knots)
    layers = np.interp(x, knots[:, 0], knots[:, 1]) + model.slope * np.maximum(x - knots[-1, 0], 0)
    total: npt.NDArray[np.float64] = (
        n * layers
        + model.attention * steps["sum_q_kv"]
        + model.kv_read * steps["sum_kv"]
        + model.head * steps["head_rows"]
        + model.sample * steps["sampled_rows"]
    )
    return total
