"""A recorded run's latencies, as prices of another schedule's steps on the same device."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engine import cache_overhead
from ..engine.latency import Features, LatencyModel
from ..engine.spec import Policy
from ..engine.step import StepPlan
from ..profiler.samples import step_features
from .steps import Ints, Journal, prices

NEAREST = 8  # recorded steps that correct a price


class Prices:
    """A model's prices of steps."""

    def __init__(self, model: LatencyModel, policy: Policy) -> None:
        self.model = model
        self._cache_overhead = cache_overhead.table_of(model, policy.cache)

    def __call__(self, plan: StepPlan) -> float:
        return cache_overhead.price_of_plan(self.model, self._cache_overhead, plan, None)


class Latencies(Prices):
    """The recorded latency of the same step, else a model's price corrected by the nearest recorded steps.

    Steps are the same if requests and features are equal. An engine's log counts heads, pairs and keys in its own way:
    there rows' tokens and prompt tokens are equal, and keys, the nearest of several, differ by no more than the step's
    tokens. The n-th takes the n-th recorded latency, later ones the mean. The correction is recorded over predicted
    time of the NEAREST steps of the same kind (prefill or decode) in log tokens, query-key pairs, keys and rows.
    """

    def __init__(self, model: LatencyModel, journal: Journal, policy: Policy, logged: bool = False) -> None:
        """logged: the steps are an engine's log."""
        super().__init__(model, policy)
        self._logged = logged
        # By the visible keys of each.
        self._same: dict[object, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._used: dict[object, int] = defaultdict(int)
        self.num_steps = 0  # priced, in all re-runs
        self.num_nearest = 0  # of these, by the nearest steps
        steps, lists = journal.steps, journal.lists
        features = step_features(steps, lists, policy.batching.pieces)
        self._latency = steps["latency"]
        ends = lists["requests"][1][1:-1]
        by_step = (np.split(lists[name][0], ends) for name in ("requests", "num_tokens"))
        keys = map(self._key, *by_step, features)
        for key, step, seconds in zip(keys, features, self._latency.tolist(), strict=True):
            self._same[key][step.sum_kv].append(seconds)
        self._priced = prices(model, journal, policy)
        # SciPy loads slowly.
        from scipy.spatial import KDTree

        points = np.array(list(map(_point, features))).reshape(-1, 4)
        self._trees: dict[bool, tuple[Ints, KDTree]] = {}  # by kind, its steps
        for prefill in np.unique(steps["prefill"]).tolist():
            rows = np.flatnonzero(steps["prefill"] == prefill)
            self._trees[bool(prefill)] = rows, KDTree(points[rows])

    def restart(self) -> None:
        """Take each step's first recorded latency again."""
        self._used.clear()

    def __call__(self, plan: StepPlan) -> float:
        self.num_steps += 1
        key = self._key(plan.requests, plan.num_tokens, plan.features)
        recorded, sum_kv = self._same.get(key, {}), plan.features.sum_kv
        nearest = min(recorded, key=lambda keys: abs(keys - sum_kv), default=math.inf)
        if abs(nearest - sum_kv) > plan.features.tokens:
            self.num_nearest += 1
            return super().__call__(plan) * self._correction(plan)
        latencies, used = recorded[nearest], self._used[key, nearest]
        self._used[key, nearest] = used + 1
        return latencies[used] if used < len(latencies) else float(np.mean(latencies))

    def _key(self, requests: Any, num_tokens: Any, f: Features) -> object:
        """What is equal in the same steps. requests, num_tokens: by row."""
        # Logs leave idle rows out.
        rows = sorted(row for row in zip(requests.tolist(), num_tokens.tolist(), strict=True) if row[1])
        return (tuple(rows), f.prefill_tokens) if self._logged else (tuple(rows), f)

    def _correction(self, plan: StepPlan) -> float:
        """Recorded over predicted time, nearest steps."""
        rows, tree = self._trees.get(plan.prefill) or self._trees[not plan.prefill]
        _, near = tree.query(_point(plan.features), k=min(NEAREST, len(rows)))
        nearest = rows[np.atleast_1d(near)]
        priced = float(self._priced[nearest].sum())
        return 1.0 if priced <= 0 else float(self._latency[nearest].sum()) / priced


def _point(f: Features) -> Sequence[float]:
    return [math.log1p(x) for x in (f.tokens, f.sum_q_kv, f.sum_kv, f.batch)]
