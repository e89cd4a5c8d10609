"""Dynamo's fast loop: one replica more or less, by estimated latencies or by thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...engine.errors import PolicyError, quoted
from .dynamo_capacity import within_budget
from .dynamo_throughput import DynamoThroughput, check_slas
from .perf_model import PerfModel
from .scaler import PoolView, Scaler

THRESHOLDS = {"throughput": (1.0, 0.6), "latency": (0.4, 0.1)}  # share of KV: up above, down below
QUEUES = {"throughput": (1.0, 0.1), "latency": (0.1, 0.0)}  # queued prompt tokens over the context: likewise


@dataclass(frozen=True)
class DynamoLoad(Scaler):
    """Adds a replica if all exceed an SLA; removes one if the others can take its load.

    mode sla: by reported step times; throughput, latency: by thresholds. While replicas start, it only removes.
    throughput_every: interval of the slow loop (DynamoThroughput), which sets minima. Nothing is decided at the first
    tick, before replicas report ("No FPM data", load_scaling.py); idle ones later report each second as empty
    (instrumented_scheduler.py).
    """

    every: float = 5.0  # s between decisions
    mode: str = "sla"  # or throughput, latency
    ttft: float = 0.5  # s, the SLA
    itl: float = 0.05  # s, the SLA
    sensitivity: float = 0.8  # share of the SLA that a smaller pool may use
    least: int = 1  # replicas of a pool
    budget: int = 8  # GPUs of the fleet
    throughput_every: float = 0.0  # s; 0: no slow loop
    predictor: str = "kalman"  # of the slow loop
    _models: dict[str, PerfModel] = field(default_factory=dict, repr=False, compare=False)
    _slow: list["SlowLoop"] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.mode not in ("sla", *THRESHOLDS):
            raise PolicyError(f"mode is {quoted(self.mode)}, expected one of sla, {', '.join(THRESHOLDS)}")
        if not 0 < self.sensitivity <= 1:
            raise PolicyError(f"sensitivity is {self.sensitivity}, expected above 0 and at most 1")
        check_slas(self.ttft, self.itl, self.least, self.budget)

    def begin(self) -> "DynamoLoad":
        models: dict[str, PerfModel] = {}
        slow = DynamoThroughput(
            self.throughput_every, self.ttft, self.itl, self.predictor, self.least, self.budget, _models=models
        )  # fmt: skip
        return replace(self, _models=models, _slow=[SlowLoop(slow)] if self.throughput_every else [])

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        is_first = not self._models
        for pool in pools:
            self._models.setdefault(pool.name, PerfModel()).observe(pool)
        bounds = self._slow[0].bounds(now, pools) if self._slow else [self.least] * len(pools)
        if is_first:
            return [pool.ready + pool.starting for pool in pools]
        found = [max(self._target(pool), bound) for pool, bound in zip(pools, bounds, strict=True)]
        return within_budget(found, pools, self.budget, self.least)

    def _target(self, pool: PoolView) -> int:
        has = pool.ready + pool.starting
        if pool.ready == 0:
            return max(has, self.least)
        change = self._by_latency(pool) if self.mode == "sla" else self._by_thresholds(pool)
        if change > 0:
            return has if pool.starting else has + 1
        return max(pool.ready - 1, self.least) if change < 0 else has

    def _by_latency(self, pool: PoolView) -> int:
        """1, 0 or -1: more replicas, the same, fewer."""
        model = self._models[pool.name]
        loads, most, hits = pool.loads, pool.max_prefill, pool.hit_rate
        accepted = max(1.0, pool.tokens_per_forward) if pool.tokens_per_forward == pool.tokens_per_forward else 1.0
        after = pool.ready / (pool.ready - 1) if pool.ready > 1 else 1.0  # load ratio with one replica less
        capacity = pool.num_pages / pool.ready * pool.page_size
        late_first, late_token, fits = True, True, pool.ready > 1
        for queued, kv in zip(loads.queued_tokens.tolist(), loads.kv_tokens.tolist(), strict=True):
            if model.time(0.0, kv) != model.time(0.0, kv):
                return 0  # step times are unknown
            if pool.role != "decode":
                late_first &= model.ttft(queued, kv, most, hits) > self.ttft
                own = model.ttft(0.0, kv * after, most, hits)
                wait = model.ttft(queued * after, kv * after, most, hits) - own
                fits &= wait < (self.ttft - own) * self.sensitivity
            if pool.role != "prefill":
                late_token &= model.itl(kv, accepted) > self.itl
                both = (kv + queued) * after
                fits &= both < capacity and model.itl(both, accepted) < self.sensitivity * self.itl
        if (late_first and pool.role != "decode") or (late_token and pool.role != "prefill"):
            return 1
        return -1 if fits else 0

    def _by_thresholds(self, pool: PoolView) -> int:
        """By queue length if the pool only prefills, else by KV use."""
        loads = pool.loads
        up, down = (QUEUES if pool.role == "prefill" else THRESHOLDS)[self.mode]
        values = loads.queued_tokens / pool.context_limit
        if pool.role != "prefill":
            queued = 0.0 if pool.role == "decode" else loads.queued_tokens
            values = (loads.kv_tokens + queued) / (pool.num_pages / pool.ready * pool.page_size)
        most = float(np.max(values))
        if most > up or (pool.role == "prefill" and most == up):
            return 1
        low = most <= down if down == 0 else most < down
        return -1 if low and pool.ready > 1 and most * pool.ready / (pool.ready - 1) < up else 0


class SlowLoop:
    """The throughput loop inside the load loop: with own ticks, seeing all requests since the last."""

    def __init__(self, scaler: DynamoThroughput) -> None:
        self._scaler = scaler
        self._next = scaler.every
        self._seen: list[Sequence[PoolView]] = []
        self._bounds: Sequence[int] = ()

    def bounds(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        """Each pool's minimum."""
        self._seen.append(pools)
        if now >= self._next:
            self._bounds = self._scaler.decide([_joined(views) for views in zip(*self._seen, strict=True)])
            self._next, self._seen = self._next + self._scaler.every, []
        return self._bounds or [self._scaler.least] * len(pools)


def _joined(views: Sequence[PoolView]) -> PoolView:
    """A pool's views merged: the last one's counts, totals and means of all."""
    sent, done = sum(view.submitted for view in views), sum(view.completed for view in views)

    def mean(name: str, counts: str, total: int) -> float:
        parts = [getattr(view, name) * getattr(view, counts) for view in views if getattr(view, counts)]
        return sum(parts) / total if total else float("nan")

    hits = [view.hit_rate for view in views if view.hit_rate == view.hit_rate]
    return views[-1]._replace(
        submitted=sent, completed=done, input_length=mean("input_length", "submitted", sent),
        output_length=mean("output_length", "completed", done),
        hit_rate=sum(hits) / len(hits) if hits else float("nan"),
    )  # fmt: skip
