"""A step's time by prompt and KV tokens, learnt from replicas' reports: Dynamo's model.

Dynamo samples each forward; here a sample is the mean of a replica's steps between ticks.
"""

from collections import deque
from math import nan

import numpy as np

from .scaler import PoolView

MOST_SAMPLES = 64
BUCKETS = 4  # of each axis
LEAST_SAMPLES = 5
MOST_HITS = 0.95  # share of a prompt that a prefix cache may save
MOST_CANDIDATES = 128  # batches of a search

Sample = tuple[float, float, float]  # a step's prompt tokens, KV tokens and time (s)


class PerfModel:
    """time = a + b * prompt tokens + c * KV tokens by least squares; none if b or c is negative."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._low, self._high = np.full(2, np.inf), np.full(2, -np.inf)
        self._prompts: deque[float] = deque(maxlen=MOST_SAMPLES)  # mean prompt of a tick
        self._contexts: deque[float] = deque(maxlen=MOST_SAMPLES)  # KV tokens of a row
        self._prefills: deque[float] = deque(maxlen=MOST_SAMPLES)  # prompt tokens of a step
        self._fit: tuple[float, float, float] | None = None

    def observe(self, pool: PoolView) -> None:
        """Add what a pool's replicas did since the last tick."""
        if pool.input_length == pool.input_length:
            self._prompts.append(pool.input_length)
        loads = pool.loads
        for i in np.flatnonzero(loads.steps > 0):
            prefill, kv = float(loads.step_prefill[i]), float(loads.step_kv[i])
            self._prefills.append(prefill)
            if loads.step_rows[i] > 0:
                self._contexts.append(kv / float(loads.step_rows[i]))
            self.add((prefill, kv, float(loads.step_time[i])))

    def add(self, sample: Sample) -> None:
        """Add a sample; if there are too many, drop the oldest of the fullest bucket, so that rare loads stay known."""
        self._samples.append(sample)
        self._low, self._high = np.fmin(self._low, sample[:2]), np.fmax(self._high, sample[:2])
        self._fit = None
        if len(self._samples) > MOST_SAMPLES:
            wide = np.maximum(self._high - self._low, 1e-12)
            places = (np.array(self._samples)[:, :2] - self._low) / wide * BUCKETS
            buckets = places.astype(np.int64).clip(max=BUCKETS - 1) @ (BUCKETS, 1)
            self._samples.pop(int((buckets == np.bincount(buckets).argmax()).argmax()))

    def time(self, prefill: float, kv: float) -> float:
        """A step's time (s); NaN: unknown."""
        if self._fit is None:
            self._fit = self._fitted()
        a, b, c = self._fit
        return max(1e-6, a + b * prefill + c * kv) if a == a else nan

    def _fitted(self) -> tuple[float, float, float]:
        if len(self._samples) < LEAST_SAMPLES:
            return nan, nan, nan
        known = np.array(self._samples)
        mean = known.mean(axis=0)
        b, c = (
            float(slope) for slope in np.linalg.lstsq(known[:, :2] - mean[:2], known[:, 2] - mean[2], rcond=None)[0]
        )
        return (nan, nan, nan) if b < 0 or c < 0 else (float(mean[2] - b * mean[0] - c * mean[1]), b, c)

    def ttft(self, queued: float, kv: float, most: float, hit_rate: float = 0.0) -> float:
        """Time (s) to prefill `queued` and another prompt in chunks of `most` while rows decode."""
        full, rest = divmod((queued + _mean(self._prompts)) * (1 - clamped(hit_rate)), most)
        return full * self.time(most, kv) + (self.time(rest, kv) if rest else 0.0)

    def itl(self, kv: float, accepted: float) -> float:
        """Time per token (s) of a replica with `kv` KV tokens and another request."""
        return self.time(_mean(self._prefills), kv + _mean(self._contexts)) / accepted


def clamped(hit_rate: float) -> float:
    """As it discounts prompts."""
    return min(max(hit_rate, 0.0), MOST_HITS) if hit_rate == hit_rate else 0.0


def _mean(values: deque[float]) -> float:
    return sum(values) / len(values) if values else 0.0
