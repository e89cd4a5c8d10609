"""Replications: the same traffic with other luck, replayed at any rate and judged by SLOs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit  # scipy.stats imports for a second

from ..engine import chance
from ..engine.errors import TraceError
from ..results.metrics import (
    REJECTED,
    ROUNDING,
    Columns,
    Floats,
    latencies,
    meeting,
    of_class,
    rows_of,
    stable,
    statistic,
)
from ..results.slo import Slo
from ..results.world import World, class_column
from ..sim.twin import Append, RunRecords
from ..traces import Trace, prepare
from ..traces.estimates import with_estimates
from ..traces.trace import Ints

CONFIDENCE = 0.95  # of intervals
STABILITY = "stability"  # what breaks where only the queue grows
BLOCKS, LUCK = 211, 212  # purposes of draws
WARMUP = 0.10  # share of arrivals not judged, as runs begin empty
COOLDOWN = 0.05  # ... as none follow the last ones
FEWEST = 100  # requests of a replay
MIN_GROWTH = 0.02  # s of wait a second of arrivals
LEAST_LEAVING = 0.75  # of the requests that arrive in a run's later half: as many must end in it


@dataclass(frozen=True)
class Criterion:
    """A statistic within a bound, or a share of arrivals that meet several bounds together."""

    slos: tuple[Slo, ...]  # with a statistic: one
    share: float | None  # of arrivals; None: a statistic
    text: str

    @property
    def bound(self) -> float:
        """s, or share of arrivals."""
        return self.slos[0].bound if self.share is None else self.share

    def times(self, factor: float) -> "Criterion":
        """With all latency bounds times a factor."""
        slos = [replace(slo, bound=factor * slo.bound, text="") for slo in self.slos]
        return criteria_of(slos, self.share or 1.0)[0]


@dataclass(frozen=True)
class Reading:
    """A judged replay. Severity: a criterion's log distance from its bound; above 0 violates it."""

    rate: float  # req/s
    values: Sequence[float]  # by criterion: s, or share of arrivals
    severities: Sequence[float]
    stable: bool
    throughput: float  # req/s completed, over the whole run
    rejected: float  # share of requests that never fit

    @property
    def holds(self) -> bool:
        """All criteria hold, and the queue stays bounded."""
        return self.stable and max(self.severities) <= 0

    @property
    def severity(self) -> float:
        """Of the criterion nearest to its bound, or furthest beyond."""
        return max(self.severities)

    @property
    def criterion(self) -> int:
        return int(np.argmax(self.severities))

    @property
    def worst(self) -> int:
        """The criterion furthest beyond its bound; -1 if none is violated."""
        return -1 if self.severity <= 0 else self.criterion


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Relative to the value."""
        return (self.high - self.low) / (2 * self.value)


def criteria_of(slos: Sequence[Slo], attainment: float) -> tuple[Criterion, ...]:
    """SLOs without a statistic are met together, by at least `attainment` of their class."""
    criteria: list[Criterion] = []
    bare: dict[str | None, list[Slo]] = {}
    for slo in slos:
        if slo.stat is None:
            bare.setdefault(slo.slo_class, []).append(slo)
        else:
            criteria.append(Criterion((slo,), slo.share, str(slo)))
    for together in bare.values():
        text = f"{100 * attainment:g}% meet {' and '.join(map(str, together))}"
        criteria.append(Criterion(tuple(together), attainment, text))
    return tuple(criteria)


def broken(criteria: Sequence[Criterion], index: int) -> str:
    """The text of the criterion that a crossing breaks; STABILITY for -1."""
    return [*(criterion.text for criterion in criteria), STABILITY][index]


def share_texts(criteria: Sequence[Criterion]) -> tuple[str, ...]:
    """The criteria that bound a share of arrivals."""
    return tuple(criterion.text for criterion in criteria if criterion.share is not None)


def replication(world: World, index: int, num_requests: int, block: int) -> tuple[World, Trace]:
    """Replication `index`: the world with its seed, and requests whose judged part has 1 req/s.

    Judged requests are blocks of the trace's (`resample`), with class, lengths, gaps. The trace is a ring: warm-up and
    cool-down are requests before and after. The world's arrival process or lengths replace the trace's. An index has
    the same requests and luck at all rates.
    """
    seed = int(chance.key(world.seed, LUCK, index)[0] >> np.uint64(2))
    lucky = replace(world, seed=seed)
    source = world.source()
    timed = len(source) > 1 and source.duration > 0
    if world.arrival == "trace" and not timed:
        raise TraceError(f"{source.name} has no arrival times, expected an arrival process (--arrival)")
    inner = judged(num_requests)
    rows = resample(len(source), inner.stop - inner.start, block, seed)
    before = np.arange(rows[0] - inner.start, rows[0])
    after = np.arange(rows[-1] + 1, rows[-1] + 1 + num_requests - inner.stop)
    drawn = source.in_order(np.concatenate((before, rows, after)) % len(source))
    ready = prepare(
        replace(drawn, notes=source.notes),
        arrival=world.arrival,
        rate=1.0,
        num_requests=num_requests,
        seed=seed,
        lengths=world.lengths,
    )
    ready = with_estimates(ready, seed)
    if world.arrival != "trace":
        return lucky, ready
    # Warm-up and cool-down are other minutes of the trace: scale by the judged part.
    span = float(ready.arrival[inner.stop - 1] - ready.arrival[inner.start])
    if not span > 0:
        raise TraceError(f"{source.name}: the {inner.stop - inner.start} requests to judge come all at once")
    return lucky, ready.time_scaled((inner.stop - inner.start - 1) / span)


def judged(num_requests: int) -> slice:
    """Requests between warm-up and cool-down."""
    return slice(int(WARMUP * num_requests), num_requests - int(COOLDOWN * num_requests))


def to_judge(num_requests: int) -> int:
    """Requests of a run that judges `num_requests`."""
    return math.ceil(num_requests / (1 - WARMUP - COOLDOWN))


def to_allow_a_miss(criteria: Sequence[Criterion]) -> int:
    """The fewest requests of a replay, in which one miss is no more than any share of the criteria allows."""
    return max([FEWEST, *(to_judge(round(1 / (1 - c.share))) for c in criteria if c.share and c.share < 1)])


def resample(num_rows: int, num_requests: int, block: int, seed: int, *, evenly: bool = True) -> Ints:
    """Blocks of consecutive rows of a ring, in random order; all rows are equally likely.

    evenly: blocks start at equal distances (systematic sampling), so that a replication covers the whole trace. Else
    anywhere (circular block bootstrap), so that replications differ as traffic may.
    """
    num_blocks = -(-num_requests // block)
    if evenly:
        u = float(chance.uniform(chance.key(seed, BLOCKS, 0))[0])
        places = (np.argsort(chance.key(seed, BLOCKS, 1, np.arange(num_blocks)), kind="stable") + u) / num_blocks
    else:
        places = chance.uniform(chance.key(seed, BLOCKS, 2, np.arange(num_blocks)))
    starts = np.floor(places * num_rows).astype(np.int64)
    rows: Ints = (starts[:, None] + np.arange(block)).reshape(-1)[:num_requests] % num_rows
    return rows


def measure(
    world: World, criteria: Sequence[Criterion], requests: Trace, rate: float, append: Append | None = None
) -> tuple[Reading, RunRecords, Columns]:
    """Replay at a rate and judge the requests between warm-up and cool-down; itl covers the whole run.

    requests: at 1 req/s. Returns the reading, the run and the judged requests. Interrupts pass through.
    """
    result = world.simulate_whole(requests.time_scaled(1 / rate), append)
    columns, n = result.table.columns, len(requests)
    inner = judged(n)
    window = rows_of(columns, inner)
    window["slo_class"] = class_column(requests)[inner]
    judgements = [_judge(c, of_class(window, c.slos[0]), result) for c in criteria]
    values, severities = zip(*judgements, strict=True)
    rejected = float((columns["status"] == REJECTED).mean())
    throughput = n * (1 - rejected) / float(np.nanmax(columns["finish"]))
    bounded = stable(columns) and not _waits_grow(columns) and not _fills(columns)
    reading = Reading(
        rate=rate, values=values, severities=severities, stable=bounded, throughput=throughput, rejected=rejected
    )
    return reading, result, window


def _waits_grow(columns: Columns) -> bool:
    """Whether waits rise by half and over MIN_GROWTH from the run's second quarter to its last, and still at its end.

    `stable` allows for chance: in a short run of bursts it misses an overload of a tenth. A day's peak is over.
    """
    arrival = columns["arrival"]
    times, waits = (
        [float(np.nanmean(eighth)) for eighth in np.array_split(values, 8)]
        for values in (arrival, columns["scheduled"] - arrival)
    )
    early, late = sum(waits[2:4]), sum(waits[6:])
    return waits[7] >= waits[6] and late - early > max(0.5 * early, 2 * MIN_GROWTH * (times[7] - times[3]))


def _fills(columns: Columns) -> bool:
    """Whether a run ends before its server is full, so that no wait shows an overload."""
    later = np.array_split(columns["arrival"], 2)[1]
    ended = (later[0] < columns["finish"]) & (columns["finish"] <= later[-1])
    return int(ended.sum()) < LEAST_LEAVING * len(later)


def interval(values: Sequence[float]) -> Interval:
    """Geometric mean and Student's interval of the logs; infinite for one value."""
    logs = np.log(values)
    mean, half = float(logs.mean()), student(logs)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def student(values: Floats) -> float:
    """Half of Student's interval of the mean; infinite for one value."""
    n = len(values)
    if n < 2:
        return math.inf
    return float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * float(values.std(ddof=1)) / math.sqrt(n)


def _judge(criterion: Criterion, requests: Columns, result: RunRecords) -> tuple[float, float]:
    """Value and severity."""
    n = len(requests["status"])
    if criterion.share is not None:
        if not n:
            return 1.0, -math.inf
        good = meeting(requests, criterion.slos)
        missed, allowed = n - int(good.sum()), (1 - criterion.share) * n * ROUNDING
        # Half a request keeps the severity finite; above 0 exactly if too many miss.
        return 1 - missed / n, math.log(max(missed, 0.5) / max(allowed, 0.5))
    slo = criterion.slos[0]
    assert slo.stat is not None
    if slo.metric == "itl":
        gaps = result.totals.itl
        value = gaps.quantile(int(slo.stat[1:]) / 100) if slo.stat != "mean" else gaps.mean()
    else:
        value = statistic(latencies(requests)[slo.metric], slo.stat)
    if math.isnan(value):
        return value, -math.inf
    return value, math.log(value / (slo.bound * ROUNDING)) if value > 0 else -math.inf
