"""The scalers of Dynamo's planner 1.6.1: `--scaler ./examples/scalers/dynamo.py:DynamoLoad,ttft=0.5,budget=8`.

Dynamo samples each forward; here a sample is the mean of a replica's steps between two ticks.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import NamedTuple, Protocol

import numpy as np

from dsim.fleet import PolicyError, PoolView, Scaler

# ---- a step's time by prompt and KV tokens, learnt from the replicas' reports (perf_model) ----

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
        full, rest = divmod((queued + _mean_of(self._prompts)) * (1 - clamped(hit_rate)), most)
        return full * self.time(most, kv) + (self.time(rest, kv) if rest else 0.0)

    def itl(self, kv: float, accepted: float) -> float:
        """Time per token (s) of a replica with `kv` KV tokens and another request."""
        return self.time(_mean_of(self._prefills), kv + _mean_of(self._contexts)) / accepted


def clamped(hit_rate: float) -> float:
    """As it discounts prompts."""
    return min(max(hit_rate, 0.0), MOST_HITS) if hit_rate == hit_rate else 0.0


def _mean_of(values: deque[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# ---- predictors of the next interval's value; zeros before the first value do not count ----

LEAST_POINTS = 5  # with fewer, the last value is the answer


class Predictor(Protocol):
    def add(self, value: float) -> None: ...
    def next(self) -> float: ...


class Constant:
    """The last value."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def add(self, value: float) -> None:
        """Add an interval's value; NaN counts as 0."""
        value = 0.0 if math.isnan(value) else value
        if value or self._values:
            self._values.append(value)
            self._added(value)

    def _added(self, value: float) -> None:
        pass

    def next(self) -> float:
        """At least 0."""
        if len(self._values) < LEAST_POINTS:
            return self._values[-1] if self._values else 0.0
        return max(0.0, self._predict())

    def _predict(self) -> float:
        return self._values[-1]


class Trend(Constant):
    """The least-squares line through the last ten values."""

    def _predict(self) -> float:
        last = self._values[-10:]
        slope, level = np.polyfit(np.arange(len(last)), last, 1)
        return float(level + slope * len(last))


class Kalman(Constant):
    """A local linear trend: the level grows by the trend; both wander."""

    Q = np.diag([1.0, 0.1])  # variances of level and trend an interval
    R = 10.0  # variance of a value
    F = np.array([[1.0, 1.0], [0.0, 1.0]])

    def __init__(self) -> None:
        super().__init__()
        self._state = np.zeros(2)
        self._variance = 1000.0 * np.eye(2)

    def _added(self, value: float) -> None:
        if len(self._values) == 1:
            self._state = np.array([value, 0.0])
            return
        state, variance = self.F @ self._state, self.F @ self._variance @ self.F.T + self.Q
        gain = variance[:, 0] / (variance[0, 0] + self.R)
        self._state = state + gain * (value - state[0])
        self._variance = variance - np.outer(gain, variance[0])

    def _predict(self) -> float:
        return float((self.F @ self._state)[0])


class Arima(Constant):
    """An ARIMA model of the order with least AIC, chosen once; needs statsmodels.

    An order without AR and MA terms is chosen anew for log(1 + value).
    """

    ORDERS = tuple((p, d, q) for d in (0, 1) for p in range(3) for q in range(3))
    KEPT = 500  # values

    def __init__(self) -> None:
        super().__init__()
        try:
            from statsmodels.tsa.arima.model import ARIMA
        except ImportError:
            raise PolicyError("predictor is arima, which needs statsmodels (pip install statsmodels)") from None
        self._model = ARIMA
        self._order: tuple[int, int, int] | None = None
        self._log = False

    def _predict(self) -> float:
        values = np.array(self._values[-self.KEPT :])
        if (values == values[0]).all():
            return float(values[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._order is None:
                self._order = self._best(values)
                if self._order[0] == self._order[2] == 0:
                    self._log, self._order = True, self._best(np.log1p(values))
            forecast = float(
                self._model(np.log1p(values) if self._log else values, order=self._order).fit().forecast()[0]
            )
        return math.expm1(forecast) if self._log else forecast

    def _best(self, values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[int, int, int]:
        return min(self.ORDERS, key=lambda order: self._model(values, order=order).fit().aic)


PREDICTORS: dict[str, Callable[[], Predictor]] = {
    "constant": Constant, "trend": Trend, "kalman": Kalman, "arima": Arima,
}  # fmt: skip


def predictor(name: str) -> Predictor:
    if name not in PREDICTORS:
        raise PolicyError(f"predictor is {name!r}, expected one of {', '.join(PREDICTORS)}")
    return PREDICTORS[name]()


# ---- requests/s of a replica within the SLAs, and the budget of GPUs (engine_query.py, budget.py) ----


class Work(NamedTuple):
    """Expected requests, in whole tokens."""

    prompt: int
    answer: int
    hit_rate: float = 0.0  # share of the prompt in a prefix cache

    @property
    def prefill(self) -> int:
        """Computed prompt tokens."""
        return max(1, math.ceil(self.prompt * (1 - clamped(self.hit_rate))))

    @property
    def context(self) -> int:
        """Tokens of a half-done request."""
        return max(1, self.prompt + self.answer // 2)


def capacity(model: PerfModel, pool: PoolView, work: Work, ttft: float, itl: float) -> float:
    """Requests/s of a replica within both SLAs (s), or its most if none is; NaN: unknown.

    Forwards of a prefill-only pool hold only prompts, those of a decode-only pool only answers.
    """
    best, best_ok = nan, False
    for rps, ok in _batches(model, pool, work, ttft, itl):
        if best != best or (ok, rps) > (best_ok, best):
            best, best_ok = rps, ok
    return best


def _batches(model: PerfModel, pool: PoolView, work: Work, ttft: float, itl: float) -> Iterator[tuple[float, bool]]:
    """Each batch's requests/s, and whether it meets the SLAs."""
    accepted = max(1.0, pool.tokens_per_forward) if pool.tokens_per_forward == pool.tokens_per_forward else 1.0
    most, kv_tokens = pool.max_prefill, pool.num_pages // max(1, pool.ready) * pool.page_size
    if pool.role == "prefill":
        for n in _sizes(1 if work.prefill > most else min(pool.max_batch, most // work.prefill)):
            took = _chunks(model, n * work.prefill, most, 0.0)
            yield n / took, took <= ttft
        return
    limit = min(pool.max_batch, kv_tokens // work.context)
    for n in _sizes(limit if pool.role == "decode" else min(limit, max(1, most - 1))):
        kv, prefill = float(n * work.context), math.ceil(n * accepted * work.prefill / max(1, work.answer))
        if pool.role == "decode":
            prefill = 0
        elif prefill > most - n:
            continue
        token = model.time(prefill, kv) / accepted
        first = 0.0 if pool.role == "decode" else _chunks(model, prefill + work.prefill, most, kv)
        yield n / (work.answer * token), token <= itl and first <= ttft


def _sizes(most: int) -> list[int]:
    """At most MOST_CANDIDATES batches from 1 to `most`, evenly spread."""
    if most <= MOST_CANDIDATES:
        return list(range(1, most + 1))
    return [1 + i * (most - 1) // (MOST_CANDIDATES - 1) for i in range(MOST_CANDIDATES)]


def _chunks(model: PerfModel, tokens: int, most: int, kv: float) -> float:
    """Seconds of a prefill in chunks of at most `most` tokens."""
    full, rest = divmod(tokens, most)
    return full * model.time(most, kv) + (model.time(rest, kv) if rest else 0.0)


def within_budget(targets: Sequence[int], pools: Sequence[PoolView], budget: int, least: int) -> list[int]:
    """Targets within a budget of GPUs: two pools shrink in proportion, others take their shares.

    If all minima exceed the budget, each pool gets its minimum.
    """
    total = sum(target * pool.gpus for target, pool in zip(targets, pools, strict=True))
    if total <= budget:
        return list(targets)
    left, found = budget, []
    for i, (target, pool) in enumerate(zip(targets, pools, strict=True)):
        later = least * sum(other.gpus for other in pools[i + 1 :])  # the later pools' minimum
        share = left // pool.gpus if i == len(pools) - 1 else math.floor(target * budget / total)
        found.append(max(least, min(share, (left - later) // pool.gpus)))
        left -= found[-1] * pool.gpus
    return found


# ---- the slow loop: the predicted load over a replica's capacity ----


@dataclass(frozen=True)
class DynamoThroughput(Scaler):
    """ceil(predicted requests/s / a replica's), at most 8 up or down.

    A pool without step times keeps its number. Dynamo's default predictor is arima.
    """

    every: float = 180.0  # s between decisions
    ttft: float = 0.5  # s, the SLA
    itl: float = 0.05  # s, the SLA
    predictor: str = "kalman"  # constant, trend, kalman or arima
    least: int = 1  # replicas of a pool
    budget: int = 8  # GPUs of the fleet
    most_change: int = 8  # replicas per decision
    _models: dict[str, PerfModel] = field(default_factory=dict, repr=False, compare=False)
    _loads: dict[str, list[Predictor]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        predictor(self.predictor)
        check_slas(self.ttft, self.itl, self.least, self.budget)

    def begin(self) -> "DynamoThroughput":
        return replace(self, _models={}, _loads={})

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        for pool in pools:
            self._models.setdefault(pool.name, PerfModel()).observe(pool)
        return self.decide(pools)

    def decide(self, pools: Sequence[PoolView]) -> list[int]:
        """Targets by known step times."""
        return within_budget([self._target(pool) for pool in pools], pools, self.budget, self.least)

    def _target(self, pool: PoolView) -> int:
        if pool.name not in self._loads:
            self._loads[pool.name] = [predictor(self.predictor) for _ in range(4)]
        seen = (pool.submitted, pool.input_length, pool.output_length, pool.hit_rate)
        for known, value in zip(self._loads[pool.name], seen, strict=True):
            known.add(value)
        requests, prompt, answer, hits = (known.next() for known in self._loads[pool.name])
        has = pool.ready + pool.starting
        if not prompt or not answer:
            return max(has, self.least)
        work = Work(math.ceil(prompt), math.ceil(answer), hits)
        rps = capacity(self._models[pool.name], pool, work, self.ttft, self.itl)
        wish = math.ceil(requests / self.every / rps) if rps == rps else has
        return max(self.least, min(max(wish, has - self.most_change), has + self.most_change))


def check_slas(ttft: float, itl: float, least: int, budget: int) -> None:
    """PolicyError if a setting is out of range."""
    for name, value in (("ttft", ttft), ("itl", itl)):
        if not 0 < value < math.inf:
            raise PolicyError(f"{name} is {value} s, expected above 0 and finite")
    if not 1 <= least <= budget:
        raise PolicyError(f"least is {least} and budget is {budget}, expected 1 <= least <= budget")


# ---- the fast loop: one replica more or less, by estimated latencies or by thresholds ----

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
            raise PolicyError(f"mode is {self.mode!r}, expected one of sla, {', '.join(THRESHOLDS)}")
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
