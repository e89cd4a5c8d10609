"""A recorded run's latencies, as prices of another schedule's steps on the same device."""

import math
from collections import defaultdict
from typing import Any

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
    they complete. An engine's log counts heads, pairs and keys in its own way: there rows' tokens and prompt tokens are
    equal, and keys, the nearest of several, differ by no more than the step's tokens. The n-th takes the n-th recorded
    latency, later ones the mean. The correction is recorded over predicted time of the NEAREST steps of the same kind
    (prefill or decode) in log tokens, query-key pairs, keys and rows.
    """

    def __init__(
        self, model: LatencyModel, steps: Columns, lists: Lists, requests: Columns, policy: Policy,
        ended: Ints | None = None, logged: bool = False,
    ) -> None:  # fmt: skip
        """ended: blocks that each step completed; None: blocks cost nothing. logged: the steps are an engine's log."""
        self._model, self._logged = model, logged
        blocks = [0] * len(steps["latency"]) if ended is None or model.host_block == 0 else ended.tolist()
        self._cache_overhead = cache_overhead.table_of(model, policy.cache)
        # By the visible keys of each.
        self._same: dict[object, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._used: dict[object, int] = defaultdict(int)
        self.num_steps = 0  # priced, in all re-runs
        self.num_nearest = 0  # of these, by the nearest steps
        features = step_features(steps, lists, policy.batching.pieces)
        left, latency = left_of(steps), steps["latency"]
        ends = lists["requests"][1][1:-1]
        rows = (np.split(lists[name][0], ends) for name in ("requests", "num_tokens"))
        keys = map(self._key, *rows, features, left, blocks)
        for key, f, seconds in zip(keys, features, latency.tolist(), strict=True):
            self._same[key][f.sum_kv].append(seconds)
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
        features = plan.features
        key = self._key(plan.requests, plan.num_tokens, features, left, blocks)
        by_keys = self._same.get(key, {})
        keys = min(by_keys, key=lambda recorded: abs(recorded - features.sum_kv), default=math.inf)
        if abs(keys - features.sum_kv) > features.tokens:
            self.num_nearest += 1
            price = cache_overhead.price(self._model, self._cache_overhead, plan, left)
            return (price + self._model.host_block * blocks) * self._correction(plan)
        recorded, used = by_keys[keys], self._used[key, keys]
        self._used[key, keys] = used + 1
        return recorded[used] if used < len(recorded) else float(np.mean(recorded))

    def _key(self, requests: Any, num_tokens: Any, f: Features, left: Features | None, blocks: int) -> object:
        """What is equal in the same steps. requests, num_tokens: by row."""
        # Logs leave idle rows out.
        rows = sorted(row for row in zip(requests.tolist(), num_tokens.tolist(), strict=True) if row[1])
        counted = (f.prefill_tokens, left and left.tokens) if self._logged else (f, left)
        return tuple(rows), counted, blocks

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
