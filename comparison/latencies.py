"""A recorded run's latencies, as prices of another schedule's steps on the same device."""

import math
from collections import defaultdict

import numpy as np

from ..engine import cache_overhead
from ..engine.latency import Features, LatencyModel
from ..engine.policy import Policy
from ..engine.step import StepPlan
from ..profiler.samples import step_features
from ..results.run import Columns
from .steps import Ints, Lists, left_of, prices

NEAREST = 8  # recorded steps that correct a price


class Latencies:
    """The recorded latency of the same step, else a model's price corrected by the nearest recorded steps.

    Steps are the same if requests and features (also after an eviction) are equal and, where blocks cost, the blocks
    they complete. The n-th takes the n-th recorded latency, later ones the mean. The correction is recorded over
    predicted time of the NEAREST steps of the same kind (prefill or decode) in log tokens, query-key pairs, keys and
    rows.
    """

    def __init__(
        self, model: LatencyModel, steps: Columns, lists: Lists, requests: Columns, policy: Policy,
        ended: Ints | None = None,
    ) -> None:  # fmt: skip
        """ended: blocks that each step completed; None: blocks cost nothing."""
        self._model = model
        blocks = [0] * len(steps["latency"]) if ended is None or model.host_block == 0 else ended.tolist()
        self._cache_overhead = cache_overhead.table_of(model, policy.cache)
        self._same: dict[object, list[float]] = defaultdict(list)
        self._used: dict[object, int] = defaultdict(int)
        self.num_steps = 0  # priced, in all re-runs
        self.num_nearest = 0  # of these, by the nearest steps
        features = step_features(steps, lists, policy.batching.pieces)
        left, latency = left_of(steps), steps["latency"]
        values, offsets = lists["requests"]
        ends = offsets.tolist()
        for i, (f, of_rest, num, seconds) in enumerate(zip(features, left, blocks, latency.tolist(), strict=True)):
            self._same[(f, of_rest, num, np.sort(values[ends[i] : ends[i + 1]]).tobytes())].append(seconds)
        self._priced = prices(model, steps, lists, requests, policy, ended)
        self._latency = latency
        self._rows = {kind: np.flatnonzero(steps["prefill"] == kind) for kind in (False, True)}
        # SciPy loads slowly.
        from scipy.spatial import KDTree

        points = np.array([_place(f) for f in features]).reshape(-1, 4)
        self._trees = {kind: KDTree(points[rows]) for kind, rows in self._rows.items() if len(rows)}

    def restart(self) -> None:
        """Take each step's first recorded latency again."""
        self._used.clear()

    def __call__(self, plan: StepPlan, left: Features | None = None, blocks: int = 0) -> float:
        self.num_steps += 1
        key = (plan.features, left, blocks, np.sort(plan.requests).tobytes())
        recorded = self._same.get(key)
        if recorded is None:
            self.num_nearest += 1
            price = cache_overhead.price(self._model, self._cache_overhead, plan, left)
            return (price + self._model.host_block * blocks) * self._correction(plan)
        used = self._used[key]
        self._used[key] = used + 1
        return recorded[used] if used < len(recorded) else float(np.mean(recorded))

    def _correction(self, plan: StepPlan) -> float:
        """Recorded over predicted time, nearest steps."""
        kind = plan.prefill if plan.prefill in self._trees else not plan.prefill
        rows = self._rows[kind]
        _, near = self._trees[kind].query(_place(plan.features), k=min(NEAREST, len(rows)))
        found = rows[np.atleast_1d(near)]
        priced = float(self._priced[found].sum())
        return float(self._latency[found].sum()) / priced if priced > 0 else 1.0


def _place(f: Features) -> list[float]:
    return [math.log1p(x) for x in (f.tokens, f.sum_q_kv, f.sum_kv, f.batch)]
