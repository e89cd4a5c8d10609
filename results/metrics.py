"""A run's metrics under vLLM's names and formulas; a field of Summary says what one is and where it is shown."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..engine.histogram import CountHistogram, TimeHistogram
from ..engine.journal import STATUSES, StepTotals
from ..files.read import read_csv
from ..files.schema import stored
from ..traces.trace import Bools as Bools
from ..traces.trace import Floats as Floats

if TYPE_CHECKING:  # it reads METRICS
    from .slo import Slo

Columns = Mapping[str, npt.NDArray[Any]]

COMPLETED, REJECTED, UNFINISHED, CANCELLED = range(len(STATUSES))
# A time equal to its bound meets it, despite rounding errors of clock differences.
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Metric:
    """What a number of a run means, and where it is shown: a row of metrics.csv."""

    name: str
    unit: str
    group: str = ""  # of rows in the table: Requests, Latency or Steps
    label: str = ""  # of the row, if not the name and the statistic
    stats: Sequence[str] = ("",)  # a row each
    brief: Sequence[str] = ()  # of these, the most important
    better: str = ""  # "high", "low" or ""
    slo: bool = False  # may be bounded
    optional: bool = False  # no row if zero or nothing for all policies
    title: str = ""  # of charts; none without
    axis: str = ""  # unit on charts
    formula: str = ""
    note: str = ""

    @property
    def scale(self) -> float:
        """From `unit` to `axis`."""
        if self.unit == "share":
            return 100.0
        return 1e-3 if self.axis == "s" else 1.0


def _metric(row: dict[str, Any]) -> Metric:
    flags = {key: row[key] == "yes" for key in ("slo", "optional")}
    stats = {key: tuple(stat.removeprefix("value") for stat in row[key].split()) for key in ("stats", "brief")}
    return Metric(**row | flags | stats)


METRICS = {row["name"]: _metric(row) for _, row in read_csv(Path(__file__).with_suffix(".csv"), ("name", "formula"))}


def after_arrival(column: str) -> Callable[[Columns], Floats]:
    return lambda requests: requests[column] - requests["arrival"]


ttft, e2el = after_arrival("first_emission"), after_arrival("finish")
# Latencies of a request in s, [requests]; NaN if it lacks one.
LATENCIES: dict[str, Callable[[Columns], Floats]] = {
    "ttft": ttft,
    "norm_latency": lambda requests: ratio(e2el(requests), requests["num_tokens"]),
    "e2el": e2el,
    "tpot_chunk": lambda requests: _between_emissions(requests, requests["num_tokens"] - requests["num_first"]),
    "tpot": lambda requests: ratio(e2el(requests) - ttft(requests), requests["num_tokens"] - 1),
    "itl": lambda requests: _between_emissions(requests, requests["num_emissions"] - 1),
    "queue_time": after_arrival("scheduled"),
}


@dataclass(frozen=True)
class Distribution:
    """None if no request has the metric."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class CountSpread:
    """None without decode steps."""

    mean: float | None = None
    p50: float | None = None


@dataclass(frozen=True)
class SloVerdict:
    """A request's bound: share of arrivals; a statistic's: value and verdict."""

    slo: str
    attainment: float | None  # None for a statistic
    observed_ms: float | None  # None for a request's bound, and for a share
    met: bool | None  # None for a request's bound


@dataclass(frozen=True)
class PrefixCache:
    """In prompt tokens, as in vLLM: once a request, at its first admission."""

    queries: int
    hits: int
    hit_rate: float | None  # None without queries


@dataclass(frozen=True)
class Summary:
    """A policy's metrics (metrics.csv); the fields are the keys of `--json`, and their order is that of all tables.

    Times are of a request unless the formula says "step". None: no value, or not measured (a client sees no steps).
    """

    policy: str
    num_requests: int
    completed: int
    rejected: int
    unfinished: int
    cancelled: int
    slo_attainment: float | None
    goodput: float | None
    request_throughput: float | None
    output_throughput: float | None
    full_loop_throughput: float | None
    duration_s: float | None
    ttft_ms: Distribution
    norm_latency_ms: Distribution
    e2el_ms: Distribution
    tpot_chunk_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    queue_time_ms: Distribution
    batch: CountSpread
    chunk: CountSpread
    step_latency_ms: Distribution
    tpf: float | None
    token_utilization: float | None
    computed_per_token: float | None
    wasted_canvas_tokens: int | None
    busy_share: float | None
    prefill_time_share: float | None
    kv_utilization: float | None
    kv_pages: int | None
    num_decode_steps: int | None
    num_prefill_steps: int | None
    preemptions: int | None
    slos: tuple[SloVerdict, ...]
    stable: bool
    prefix_cache: PrefixCache | None  # None: the policy has none

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return dict(stored(self))


STATS = tuple(stat.name for stat in fields(Distribution))


def path(name: str, stat: str = "") -> str:
    """Dotted keys of a metric in a summary."""
    key = name + "_ms" * (METRICS[name].unit == "ms")
    return ".".join(filter(None, [key, stat]))


def led_by(*first: str) -> list[str]:
    """The names of METRICS, `first` in front."""
    return [*first, *(name for name in METRICS if name not in first)]


def summarize(
    policy: str,
    requests: Columns,
    totals: StepTotals,
    slos: "Sequence[Slo]" = (),
    *,
    replicas: int = 1,
    replica_time: float | None = None,
    closed_loop: bool = False,
    caches_prefixes: bool = False,
) -> Summary:
    """Metrics of a run's request columns (REQUEST_COLUMNS) and step totals.

    SLOs of a class need a column slo_class.
    """
    arrival, status, done = requests["arrival"], requests["status"], requests
    if not (status == COMPLETED).all():  # else without a copy of a million rows
        done = rows_of(requests, status == COMPLETED)
    start = float(arrival.min(initial=math.inf))
    duration = float(done["finish"].max(initial=-math.inf)) - start  # not finite: nothing completed
    counts: dict[str, Any] = {name: int((status == i).sum()) for i, name in enumerate(STATUSES)}
    dist: dict[str, Any] = {name: _distribution(values) for name, values in latencies(done).items()}
    dist["itl"] = _from_histogram(totals.itl)
    good = good_requests(requests, slos)
    num_good = math.nan if good is None else float(good.sum())
    full_loop, prefix_cache = None, None
    if closed_loop:
        full_loop = _full_loop(done, start, float(arrival.max(initial=start)))
    if caches_prefixes:
        queries, hits = totals.prefix_queries, totals.prefix_hits
        prefix_cache = PrefixCache(queries, hits, _per(hits, queries))
    if replica_time is None:
        replica_time = replicas * float(np.fmax(duration, totals.end - start))
    num_tokens = float(done["num_tokens"].sum())
    busy = totals.prefill_time + totals.decode_time
    return Summary(
        policy=policy,
        num_requests=len(status),
        **counts,
        duration_s=finite(duration),
        request_throughput=_per(counts["completed"], duration),
        output_throughput=_per(num_tokens, duration),
        full_loop_throughput=full_loop,
        **{f"{name}_ms": d for name, d in dist.items()},
        goodput=_per(num_good, duration),
        slo_attainment=_per(num_good, len(status)),
        slos=tuple(_verdict(slo, requests, dist) for slo in slos),
        batch=_spread(totals.batch),
        chunk=_spread(totals.chunk),
        tpf=_per(totals.committed, totals.forwards),
        token_utilization=_per(totals.committed, totals.tokens - totals.evicted),
        computed_per_token=_per(totals.tokens - totals.evicted, float(requests["num_tokens"].sum())),
        wasted_canvas_tokens=int(done["num_committed"].sum() - done["num_tokens"].sum()),
        step_latency_ms=_from_histogram(totals.step_latency),
        num_decode_steps=totals.num_decode_steps,
        num_prefill_steps=totals.num_prefill_steps,
        prefill_time_share=_per(totals.prefill_time, busy),
        busy_share=_per(busy, replica_time),  # None: nothing completed
        kv_utilization=_per(totals.page_time, totals.num_pages / replicas * busy),
        kv_pages=totals.num_pages,
        preemptions=totals.preemptions,
        stable=stable(requests, closed_loop=closed_loop),
        prefix_cache=prefix_cache,
    )


def latencies(requests: Columns) -> dict[str, Floats]:
    """Latency metrics in s, [requests]; NaN if a request lacks one."""
    return {name: latency(requests) for name, latency in LATENCIES.items()}


def _between_emissions(requests: Columns, num: Floats) -> Floats:
    """From the first to the last emission over `num`; NaN with a single emission."""
    span = requests["last_emission"] - requests["first_emission"]
    return np.where(requests["num_emissions"] > 1, ratio(span, num), np.nan)


def good_requests(requests: Columns, slos: "Sequence[Slo]") -> Bools | None:
    """The requests that completed and meet every request's SLO; None without such an SLO."""
    bounds = [slo for slo in slos if slo.stat is None]
    return meeting(requests, bounds) if bounds else None


def meeting(requests: Columns, slos: "Sequence[Slo]") -> Bools:
    """The requests that completed and meet every bound, whatever its statistic; without a metric they meet its bounds.

    SLOs of a class need a column slo_class.
    """
    values = latencies(requests)
    good = np.asarray(requests["status"] == COMPLETED)
    for slo in slos:
        value = values[slo.metric]
        meets = ~(value > slo.bound * ROUNDING)
        if slo.slo_class is not None:
            meets |= requests["slo_class"] != slo.slo_class
        good = good & meets
    return good


def rows_of(requests: Columns, rows: Any) -> dict[str, npt.NDArray[Any]]:
    """Those of a mask, of indices or of a slice."""
    return {name: column[rows] for name, column in requests.items()}


def of_class(requests: Columns, slo: "Slo") -> Columns:
    if slo.slo_class is None:
        return requests
    return rows_of(requests, requests["slo_class"] == slo.slo_class)


def attainment(requests: Columns, slo: "Slo") -> float:
    """Share of arrivals that completed and meet the bound; NaN without arrivals."""
    good = meeting(requests, [slo])
    return float(good.mean()) if len(good) else math.nan


def stable(requests: Columns, *, closed_loop: bool = False) -> bool:
    """Whether the queue stays bounded.

    Above saturation the wait grows by load - 1 per second of arrivals. Unstable: it grows by more than chance
    explains (`_drift`) over the run and its second half, and 90 % of its last quarter exceed both the second quarter's
    mean and the median service time; or nothing completed; or a request has waited for a quarter of the run at its end.
    Rejected requests do not count. A closed loop is stable.
    """
    status, scheduled = requests["status"], requests["scheduled"]
    waits = (status == UNFINISHED) & np.isnan(scheduled)
    if (status == UNFINISHED).any() and not (status == COMPLETED).any():
        return False
    if waits.any():
        times = np.concatenate([requests["arrival"], requests["finish"], scheduled])
        begin, end = float(requests["arrival"].min()), float(np.nanmax(times))
        if end - float(requests["arrival"][waits].min()) > max(MIN_WAIT, MOST_WAITING * (end - begin)):
            return False
    queued = (status != REJECTED) & ~np.isnan(scheduled)
    order = np.argsort(requests["arrival"][queued], kind="stable")
    arrival, scheduled, finish = (requests[name][queued][order] for name in ("arrival", "scheduled", "finish"))
    n = len(arrival)
    if closed_loop or n < MIN_REQUESTS:
        return True
    wait = scheduled - arrival
    early, late = wait[n // 4 : n // 2], wait[3 * n // 4 :]
    service = (finish - scheduled)[~np.isnan(finish)]
    floor = np.fmax(MIN_WAIT, statistic(service, "p50"))
    shortest_late = float(np.percentile(late, 10))
    growing = _slope(arrival, wait) > MIN_GROWTH and _slope(arrival[n // 2 :], wait[n // 2 :]) > 0
    return not (growing and shortest_late > max(float(early.mean()), floor) and _drift(arrival, wait) > 0)


MIN_REQUESTS = 20  # below, a run is stable
MIN_WAIT = 1.0  # s
MIN_GROWTH = 0.02  # s of wait a second of arrivals: a load of 1.02
MOST_WAITING = 0.25  # of the run
BLOCKS = 20  # of a run; their waits are compared
# Standard errors by which the mean rise must exceed zero: at a load of 0.9 fewer than 1 in 100 runs of 400 requests do,
# with constant and exponential service times (tests/results/test_stable.py).
LUCK = 2.25
LUCK_OF_BURSTS = 0.25  # for each unit of the gaps' coefficient of variation above 1


def _drift(arrival: Floats, wait: Floats) -> float:
    """The wait's rise from block to block, in standard errors of a wait without trend.

    That is a random walk whose steps vary at least as a block's sum of gaps; a sometimes empty queue hides part of it.
    """
    size = max(1, len(wait) // BLOCKS)
    rises = np.diff(wait[size - 1 :: size], prepend=0.0)
    gaps = np.diff(arrival)
    mean, spread = float(gaps.mean()), float(gaps.std())
    scatter = max(float(rises.std(ddof=1)), spread * math.sqrt(size))
    if not scatter > 0:
        return math.inf if rises.mean() > 0 else -math.inf
    bursts = max(0.0, spread / mean - 1.0) if mean > 0 else 0.0
    return float(rises.mean()) / (scatter / math.sqrt(len(rises))) - LUCK - LUCK_OF_BURSTS * bursts


def _slope(x: Floats, y: Floats) -> float:
    dx = x - x.mean()
    spread = float(dx @ dx)
    return float(dx @ y) / spread if spread > 0 else 0.0  # simultaneous arrivals


def _full_loop(done: Columns, start: float, end: float) -> float | None:
    """Output tokens/s until the last request of a closed loop is sent, at `end`; None if all are sent at once."""
    share = ratio(np.minimum(done["finish"], end) - done["arrival"], e2el(done))
    return _per(float(np.nansum(done["num_tokens"] * share)), end - start)


def _verdict(slo: "Slo", requests: Columns, dist: Mapping[str, Distribution]) -> SloVerdict:
    verdict = SloVerdict(str(slo), attainment=None, observed_ms=None, met=None)
    if slo.slo_class is not None:
        requests = of_class(requests, slo)
        if not len(requests["status"]):  # it is after num_requests
            return replace(verdict, met=slo.stat is not None or None)
        done = rows_of(requests, requests["status"] == COMPLETED)
        dist = {slo.metric: _distribution(latencies(done)[slo.metric])}
    if slo.stat is None or slo.share is not None:
        attained = attainment(requests, slo)
        if slo.share is not None:
            verdict = replace(verdict, met=attained >= slo.share - 1e-9)
        return replace(verdict, attainment=finite(attained))
    observed_ms: float | None = getattr(dist[slo.metric], slo.stat)
    status = requests["status"]
    # An unfinished request may still miss it.
    judged = (status == COMPLETED).any() and not (status == UNFINISHED).any()
    passes = observed_ms is None or observed_ms <= slo.bound * 1e3 * ROUNDING
    return replace(verdict, observed_ms=observed_ms, met=bool(judged and passes))


def _distribution(seconds: Floats) -> Distribution:
    values = seconds[~np.isnan(seconds)] * 1e3
    if not len(values):
        return Distribution()
    return Distribution(float(values.mean()), *np.percentile(values, (50, 90, 95, 99)).tolist())


def statistic(values: Floats, stat: str) -> float:
    """`mean`, or a percentile such as `p90`, of the known values; NaN without any."""
    values = values[~np.isnan(values)]
    if not len(values):
        return math.nan
    return float(values.mean() if stat == "mean" else np.percentile(values, int(stat[1:])))


def _from_histogram(times: TimeHistogram) -> Distribution:
    values = [times.mean(), *(times.quantile(int(stat[1:]) / 100) for stat in STATS[1:])]
    return Distribution(*(finite(value * 1e3) for value in values))


def _spread(counts: CountHistogram) -> CountSpread:
    if not len(counts.counts):
        return CountSpread()
    return CountSpread(mean=counts.mean(), p50=counts.quantile(0.5))


def ratio(a: Any, b: Any) -> Floats:
    """NaN unless b > 0."""
    out: Floats = np.divide(a, b, out=np.full(len(a), np.nan), where=b > 0)
    return out


def _per(amount: float, base: float) -> float | None:
    """None unless the ratio is finite and base > 0."""
    return None if not base > 0 else finite(amount / base)


def finite(value: float) -> float | None:
    """None of a value that is not finite."""
    return float(value) if math.isfinite(value) else None


def flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Under flat names such as `ttft_ms_mean`."""
    row: dict[str, Any] = {}
    for name, value in summary.items():
        if name == "policy" or (name == "prefix_cache" and value is None):
            continue
        if name == "slos":
            for verdict in value:
                row |= {f"{verdict['slo']} {key}": verdict[key] for key in ("attainment", "observed_ms", "met")}
        elif isinstance(value, dict):
            row |= {f"{name}_{stat}": number for stat, number in value.items()}
        else:
            row[name] = value
    return row
