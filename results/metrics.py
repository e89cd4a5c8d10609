"""A run's metrics under vLLM's names and formulas; a field of Summary says what one is and where it is shown."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..engine.histogram import CountHistogram, TimeHistogram
from ..engine.journal import STATUSES, StepTotals

if TYPE_CHECKING:  # it reads METRICS
    from .slo import Slo

Columns = Mapping[str, npt.NDArray[Any]]
Floats = npt.NDArray[np.float64]

COMPLETED, REJECTED, UNFINISHED, CANCELLED = range(len(STATUSES))
# A time equal to its bound meets it, despite rounding errors of clock differences.
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Metric:
    """What a number of a run means, and where it is shown."""

    unit: str
    formula: str
    note: str = ""
    of: Callable[[Columns], Floats] | None = None  # s, [requests]; NaN if a request lacks it
    slo: bool = False  # may be bounded
    group: str = ""  # of rows in the table: Requests, Latency or Steps
    label: str = ""  # of the row, if not the name and the statistic
    stats: Sequence[str] = ("",)  # a row each
    brief: Sequence[str] = ()  # of these, the most important
    better: str = ""  # "high", "low" or ""
    optional: bool = False  # no row if zero or nothing for all policies
    title: str = ""  # of charts; none without
    axis: str = ""  # unit on charts

    @property
    def scale(self) -> float:
        """From `unit` to `axis`."""
        return 100.0 if self.unit == "share" else 1e-3 if self.axis == "s" else 1.0


def metric(unit: str, formula: str, note: str = "", **about: Any) -> Any:
    return field(metadata={"metric": Metric(unit, formula, note, **about)})


def latency(formula: str, note: str = "", *, stats: Sequence[str] = ("p50", "p99"), **about: Any) -> Any:
    """A metric of each request, `of`, whose distribution over the completed ones is shown."""
    return metric("ms", formula, note, group="Latency", stats=stats, better="low", optional=True, **about)


def after_arrival(column: str) -> Callable[[Columns], Floats]:
    return lambda requests: requests[column] - requests["arrival"]


ttft, e2el = after_arrival("first_emission"), after_arrival("finish")


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
    min: float | None = None
    max: float | None = None


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
    """A policy's metrics; the fields are the keys of `--json`, and their order is that of all tables.

    Times are of a request unless the formula says "step". None: no value, or not measured (a client sees no steps).
    """

    # fmt: off
    policy: str
    num_requests: int = metric("requests", "completed + rejected + unfinished + cancelled")
    completed: int = metric("requests", "all tokens returned", group="Requests")
    rejected: int = metric(
        "requests", "can never fit the KV pool or the context limit", group="Requests", optional=True,
    )
    unfinished: int = metric("requests", "in flight when the run ended", group="Requests", optional=True)
    cancelled: int = metric(
        "requests", "dropped as their clients left", "in no latency", group="Requests", optional=True,
    )
    slo_attainment: float | None = metric(
        "share", "requests that meet every per-request SLO / arrivals",
        "rejected, unfinished and cancelled requests are not good; null without such an SLO",
        group="Requests", label="SLO attainment", brief=("",), better="high", optional=True,
        title="SLO attainment", axis="% of arrivals",
    )
    goodput: float | None = metric(
        "req/s", "requests that complete and meet every per-request SLO / duration",
        "null without such an SLO; an SLO of a class judges only its requests",
        group="Requests", brief=("",), better="high", optional=True, title="Goodput", axis="req/s",
    )
    request_throughput: float | None = metric(
        "req/s", "completed / duration", group="Requests", better="high",
    )
    output_throughput: float | None = metric(
        "tok/s", "output tokens of completed requests / duration", group="Requests",
        brief=("",), better="high", title="Output throughput", axis="tok/s",
    )
    full_loop_throughput: float | None = metric(
        "tok/s", "output tokens until a closed loop's last arrival, spread evenly over e2els / time until then",
        "without the end, when clients run out of requests; null in an open loop", group="Requests",
        label="throughput, loop full", better="high", optional=True,
    )
    total_token_throughput: float | None = metric(
        "tok/s", "input and output tokens of completed requests / duration",
    )
    duration_s: float | None = metric("s", "last completion - first arrival", group="Requests", label="duration")
    ttft_ms: Distribution = latency(
        "first emission - arrival", "what an emission is: --emit step, block or end",
        of=ttft, slo=True, stats=("p50", "p90", "p99"), brief=("p50", "p99"),
        title="Time to first token", axis="s",
    )
    ttfb_ms: Distribution = latency(
        "first whole block ready - arrival", "equals ttft under --emit block",
        of=after_arrival("first_block"), slo=True, stats=(),
    )
    ttfs_ms: Distribution = latency(
        "first commit at any position - arrival", "the scheduler's view; users do not see it",
        of=after_arrival("first_commit"), stats=(),
    )
    norm_latency_ms: Distribution = latency(
        "e2el / N", "every request has one; a target such as 50ms/token is a bound on it",
        of=lambda requests: ratio(e2el(requests), requests["num_tokens"]), slo=True,
        stats=("p50", "p90", "p99"), brief=("p50", "p99"),
        title="Normalised latency (e2el / tokens)", axis="ms a token",
    )
    e2el_ms: Distribution = latency(
        "finish - arrival", of=e2el, slo=True, stats=("p50", "p90", "p99"), brief=("p99",),
        title="End-to-end latency", axis="s",
    )
    tpot_chunk_ms: Distribution = latency(
        "(last emission - first emission) / (N - tokens of the first emission)",
        "the unbiased pace; missing with a single emission",
        of=lambda requests: _between_emissions(requests, requests["num_tokens"] - requests["num_first"]), slo=True,
        title="Pace after the first emission (tpot_chunk)", axis="ms a token",
    )
    tpot_ms: Distribution = latency(
        "(e2el - ttft) / (N - 1)",
        "exactly vLLM's; missing when N = 1; too small under block emission, zero for a single block",
        of=lambda requests: ratio(e2el(requests) - ttft(requests), requests["num_tokens"] - 1), slo=True,
    )
    itl_ms: Distribution = latency(
        "gaps between a request's emissions, pooled over requests",
        "one per gap, not repeated per token; percentiles to 0.05 %",
        of=lambda requests: _between_emissions(requests, requests["num_emissions"] - 1), slo=True,
    )
    queue_time_ms: Distribution = latency("start of the first prefill - arrival", of=after_arrival("scheduled"))
    batch: CountSpread = metric(
        "rows", "sequences in a decode step", group="Steps", stats=("mean",), brief=("mean",),
    )
    chunk: CountSpread = metric(
        "positions", "most positions that a sequence may compute in a decode step",
        group="Steps", stats=("mean",), brief=("mean",),
    )
    step_latency_ms: Distribution = metric(
        "ms", "decode step's end - start", "percentiles to 0.05 %", group="Steps", stats=("p50", "p99"),
    )
    tpf: float | None = metric(
        "tok", "positions committed / (sequences x forwards), over the rows of decode steps that do not prefill",
        "tokens per forward", group="Steps", label="tokens per forward",
    )
    token_utilization: float | None = metric(
        "share", "positions committed / computed in all layers, over the rows of decode steps that do not prefill",
        group="Steps", label="token utilisation", brief=("",),
    )
    computed_per_token: float | None = metric(
        "positions",
        "positions computed in all layers, over the rows of decode steps that do not prefill / tokens returned",
        "FOCUS's processed / decoded: without prefill; committed and trimmed positions are computed, not returned",
        group="Steps", label="computed a token", better="low",
    )
    tokens_per_emission: float | None = metric(
        "tok", "output tokens / emissions, over completed requests", "compare it with itl", group="Steps",
    )
    wasted_canvas_tokens: int | None = metric(
        "tok", "positions committed - tokens returned, over completed requests",
        group="Steps", label="wasted canvas", better="low", optional=True,
    )
    busy_share: float | None = metric(
        "share", "time in steps / (replicas x (end of the last step or completion - first arrival))",
        "an engine may compute on for a row that has finished",
        group="Steps", label="busy", title="Share of time in steps", axis="%",
    )
    prefill_time_share: float | None = metric(
        "share", "time in prefill steps / time in steps", group="Steps", label="time in prefill",
    )
    kv_utilization: float | None = metric(
        "share", "sum over steps of (KV pages held x latency) / (pages of a replica x time in steps)",
        group="Steps", label="KV utilisation",
    )
    kv_pages: int | None = metric("pages", "the KV pool, summed over replicas")
    num_decode_steps: int | None = metric("steps", "decode steps of all replicas", group="Steps", stats=())
    num_prefill_steps: int | None = metric("steps", "prefill steps of all replicas", group="Steps", stats=())
    preemptions: int | None = metric(
        "requests", "sent back to the queue because the KV pool was full", group="Steps", better="low", optional=True,
    )
    slos: tuple[SloVerdict, ...] = metric(
        "", "each SLO: the share of arrivals that meet it, or with a statistic the run's value and whether it is met",
        "a bound on the run is judged over completed requests and is not met while requests are unfinished; an SLO of "
        "a class covers only that class",
    )
    stable: bool = metric(
        "", "false when the queueing delay keeps growing, or requests still pile up at the end",
        "delay rises over the run and its second half, by more than luck explains, and 90 % of its last quarter "
        "exceeds the second quarter's mean, 1 s and the median time in service",
    )
    prefix_cache: PrefixCache | None = metric(  # None: the policy has none
        "share", "hit_rate: hits, tokens of admitted prompts found in the prefix cache / queries, all of their tokens",
        "only where the policy has prefix_caching; a request that was preempted counts once",
        group="Steps", label="prefix cache hits", stats=("hit_rate",), better="high", optional=True,
    )
    # fmt: on

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return dict(no_nan(self))


METRICS: dict[str, Metric] = {
    column.name.removesuffix("_ms"): column.metadata["metric"] for column in fields(Summary) if column.metadata
}
STATS = tuple(stat.name for stat in fields(Distribution))


def path(name: str, stat: str = "") -> str:
    """Dotted keys of a metric in a summary."""
    key = f"{name}_ms" if METRICS[name].unit == "ms" else name
    return f"{key}.{stat}" if stat else key


def led_by(*first: str) -> list[str]:
    """The names of METRICS, `first` in front."""
    return [*first, *(name for name in METRICS if name not in first)]


def summarize(
    policy: str,
    requests: Columns,
    totals: StepTotals,
    slos: "Sequence[Slo]" = (),
    *,
    missing_passes: bool = True,
    replicas: int = 1,
    replica_time: float | None = None,
    closed_loop: bool = False,
    caches_prefixes: bool = False,
) -> Summary:
    """Metrics of a run's request columns (REQUEST_COLUMNS) and step totals.

    missing_passes: a request without a metric (tpot of a single token) meets a bound on it. SLOs of a class need a
    column slo_class.
    """
    arrival = requests["arrival"]
    start = float(arrival.min()) if len(arrival) else math.nan
    status = requests["status"]
    completed = status == COMPLETED
    done = requests if completed.all() else rows_of(requests, completed)  # without a copy of a million rows
    duration = float(done["finish"].max()) - start if completed.any() else math.nan
    counts: dict[str, Any] = {name: int((status == i).sum()) for i, name in enumerate(STATUSES)}
    dist: dict[str, Any] = {name: _distribution(values) for name, values in latencies(done).items()}
    dist["itl"] = _from_histogram(totals.itl)
    good = good_requests(requests, slos, missing_passes=missing_passes)
    num_tokens = float(done["num_tokens"].sum())
    busy = totals.prefill_time + totals.decode_time
    queries, hits = totals.prefix_queries, totals.prefix_hits
    return Summary(
        policy=policy,
        num_requests=len(status),
        **counts,
        duration_s=_known(duration),
        request_throughput=_per(counts["completed"], duration),
        output_throughput=_per(num_tokens, duration),
        full_loop_throughput=_full_loop(done, start, float(arrival.max(initial=start))) if closed_loop else None,
        total_token_throughput=_per(num_tokens + float(done["input_length"].sum()), duration),
        **{f"{name}_ms": d for name, d in dist.items()},
        tokens_per_emission=_per(num_tokens, float(done["num_emissions"].sum())),
        goodput=None if good is None else _per(float(good.sum()), duration),
        slo_attainment=None if good is None else _per(float(good.sum()), len(good)),
        slos=tuple(_verdict(slo, requests, dist, missing_passes) for slo in slos),
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
        busy_share=_per(
            busy,
            replicas * float(np.fmax(duration, totals.end - start)) if replica_time is None else replica_time,
        ),  # None: nothing completed
        kv_utilization=_per(totals.page_time, totals.num_pages / replicas * busy),
        kv_pages=totals.num_pages,
        preemptions=totals.preemptions,
        stable=stable(requests, closed_loop=closed_loop),
        prefix_cache=PrefixCache(queries, hits, _per(hits, queries)) if caches_prefixes else None,
    )


def latencies(requests: Columns) -> dict[str, Floats]:
    """Latency metrics in s, [requests]; NaN if a request lacks one."""
    return {name: metric.of(requests) for name, metric in METRICS.items() if metric.of is not None}


def _between_emissions(requests: Columns, num: Floats) -> Floats:
    """From the first to the last emission over `num`; NaN with a single emission."""
    span = requests["last_emission"] - requests["first_emission"]
    return np.where(requests["num_emissions"] > 1, ratio(span, num), np.nan)


def good_requests(
    requests: Columns, slos: "Sequence[Slo]", *, missing_passes: bool = True
) -> npt.NDArray[np.bool_] | None:
    """The requests that completed and meet every request's SLO; None without such an SLO."""
    bounds = [slo for slo in slos if slo.stat is None]
    return meeting(requests, bounds, missing_passes=missing_passes) if bounds else None


def meeting(requests: Columns, slos: "Sequence[Slo]", *, missing_passes: bool = True) -> npt.NDArray[np.bool_]:
    """The requests that completed and meet every bound, whatever its statistic.

    SLOs of a class need a column slo_class.
    """
    values = latencies(requests)
    good = np.asarray(requests["status"] == COMPLETED)
    for slo in slos:
        value = values[slo.metric]
        meets = (value <= slo.bound * ROUNDING) | (np.isnan(value) & missing_passes)
        good = good & (meets if slo.slo_class is None else meets | (requests["slo_class"] != slo.slo_class))
    return good


def rows_of(requests: Columns, rows: Any) -> dict[str, npt.NDArray[Any]]:
    """Those of a mask, of indices or of a slice."""
    return {name: column[rows] for name, column in requests.items()}


def of_class(requests: Columns, slo: "Slo") -> Columns:
    if slo.slo_class is None:
        return requests
    return rows_of(requests, requests["slo_class"] == slo.slo_class)


def attainment(requests: Columns, slo: "Slo", *, missing_passes: bool = True) -> float:
    """Share of arrivals that completed and meet the bound; NaN without arrivals."""
    good = meeting(requests, [slo], missing_passes=missing_passes)
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
    floor = max(MIN_WAIT, float(np.percentile(service, 50)) if len(service) else 0.0)
    shortest_late = float(np.percentile(late, 10))
    growing = _slope(arrival, wait) > MIN_GROWTH and _slope(arrival[n // 2 :], wait[n // 2 :]) > 0
    return not (growing and shortest_late > max(float(early.mean()), floor) and _drift(arrival, wait) > 0)


MIN_REQUESTS = 20  # below, a run is stable
MIN_WAIT = 1.0  # s
MIN_GROWTH = 0.02  # s of wait a second of arrivals: a load of 1.02
MOST_WAITING = 0.25  # of the run
BLOCKS = 20  # whose waits are compared
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


def _verdict(slo: "Slo", requests: Columns, dist: Mapping[str, Distribution], missing_passes: bool) -> SloVerdict:
    if slo.slo_class is not None:
        requests = of_class(requests, slo)
        if not len(requests["status"]):  # it is after num_requests
            return SloVerdict(str(slo), None, None, None if slo.stat is None else True)
        done = rows_of(requests, requests["status"] == COMPLETED)
        dist = {slo.metric: _distribution(latencies(done)[slo.metric])}
    if slo.stat is None or slo.share is not None:
        attained = attainment(requests, slo, missing_passes=missing_passes)
        met = None if slo.share is None else attained >= slo.share - 1e-9
        return SloVerdict(str(slo), _known(attained), None, met)
    observed_ms: float | None = getattr(dist[slo.metric], slo.stat)
    status = requests["status"]
    # An unfinished request may still miss it.
    judged = bool((status == COMPLETED).any()) and not bool((status == UNFINISHED).any())
    passes = missing_passes if observed_ms is None else observed_ms <= slo.bound * 1e3 * ROUNDING
    return SloVerdict(str(slo), None, observed_ms, judged and passes)


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
    return Distribution(*(_known(value * 1e3) for value in values))


def _spread(counts: CountHistogram) -> CountSpread:
    values = [float(v) for v in counts.counts]
    return CountSpread(counts.mean(), counts.quantile(0.5), min(values), max(values)) if values else CountSpread()


def ratio(a: Any, b: Any) -> Floats:
    """NaN unless b > 0."""
    out: Floats = np.divide(a, b, out=np.full(len(a), np.nan), where=b > 0)
    return out


def _per(amount: float, base: float) -> float | None:
    return amount / base if base > 0 else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


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


def no_nan(value: Any) -> Any:
    """As JSON: NaN and infinity become null, NumPy numbers Python's, dataclasses objects."""
    if is_dataclass(value) and not isinstance(value, type):
        stored = [field.name for field in fields(value) if field.metadata.get("stored", True)]
        return {name: no_nan(getattr(value, name)) for name in stored}
    if isinstance(value, Mapping):
        return {str(key): no_nan(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [no_nan(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
