"""The highest rate at which a fleet meets all SLOs, with an interval, and the fewest replicas for a rate.

A replication has the same requests and luck at all rates: bisection finds its capacity. Replications are added until
Student's interval is narrow.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.errors import DsimError
from ..files.read import quoted
from ..report.capacity import CURVE_NEAR, CURVE_REPLICATIONS
from ..report.page import Page
from ..report.result import Result, frame_of
from ..results.metrics import STATS, Columns, latencies, no_nan, rows_of, statistic
from ..results.scenario import MAX_REPLICAS, Scenario, classes, replicas_of
from ..results.slo import Slo
from ..sim.scalers import FIXED
from ..traces.trace import MAX_REQUESTS
from ..traces.trace import check_rate as check_traffic
from . import replicate
from .backend import Pool
from .contents import Json, asked_of
from .crossing import Found, Slope, common_slope, find, never
from .fewest import Fewest
from .limits import Limit, PoolShares
from .memo import Memo
from .race import LIMIT
from .replicate import Criterion, Interval, Reading, criteria_of, interval, judge, measure, replication

if TYPE_CHECKING:
    import pandas as pd

FEWEST = 6000  # requests of a replay; with the next line, grows below USUAL_PRECISION
MANY, WHOLE = 10_000, 24_000  # most: with an arrival process, with the trace's times
USUAL_PRECISION = 0.02  # a run's ends bias it, a longer run less; must stay below the interval
PER_REPLICA = 1000  # least requests
PARTS = 4  # blocks in the trace, or in the judged requests
FIRST = 8  # replications before the first check; half if they agree
TO_LEARN = 2  # replications that give the others start and slope
BY_FAR = 0.25  # of the precision, accepted by an early check; more would stop too early too often
MOST = 64  # replications
CONFIDENCE = 0.95  # of the interval
MAX_REPLICAS_TRIED = 64
PILOT_DOUBT = 0.5  # relative, of a pilot's slope
SHARPNESS = 0.5  # width of a capacity's bracket, by the precision or the spread
IDLE = 1e-3  # of saturation
BEYOND = 4.0  # times saturation: an SLO met there never binds
FLOOD = 1e9  # req/s, all at once
PILOT, PILOT_GUESS, PILOT_WIDTH, PILOT_SHARPNESS = 2**20, 0.8, 0.2, 0.03  # index; of the flood's rate; log rates
PILOT_SHARE, PILOT_FEWEST, PILOT_BLOCKS = 8, 500, 20  # share of requests, at least; blocks
GRID = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1)  # of the capacity, for the curve
OTHERS = (0.9, 1.1)  # times the binding bound
STABILITY = "stability"
SEEN = ("ttft", "tpot_chunk")  # latencies of clients at capacity

Latency = dict[str, dict[str, float] | None]


@dataclass(frozen=True)
class Point:
    """A point of the curve: means, in ms or share of arrivals."""

    rate: float  # req/s
    values: dict[str, float]
    stable: bool  # in every replication
    holds: bool  # in every replication


@dataclass(frozen=True)
class AtBound:
    """The capacity with another bound, read from the curve's replays."""

    slo: str
    rate: float  # req/s
    side: str  # "below" or "at least" at an end of the curve


@dataclass(frozen=True)
class Cost:
    """In the currency of the price."""

    gpus: int
    per_hour: float
    per_million_tokens: float  # of answers, at the asked rate, else at capacity


@dataclass(frozen=True)
class PoolPart:
    """A pool at the fleet's capacity."""

    name: str
    replicas: int
    gpus: int  # of all replicas
    policy: str
    profile: str
    busy: float = 0.0  # share of time spent in steps
    shares: Mapping[str, float] = field(default_factory=dict)  # of the busy time
    limited_by: str = ""
    limiting_setting: str = ""
    one_less: Mapping[str, float] = field(default_factory=dict)  # criterion -> value with one replica less


@dataclass(frozen=True, repr=False)
class Capacity(Result):
    """A fleet's capacity under SLOs."""

    rate: Interval  # req/s
    replicas: int
    binding_slo: str  # the SLO broken above capacity; "stability": the queue grows first
    limited_by: str  # compute, KV memory, activation budget or host overhead
    curve: tuple[Point, ...]
    num_replays: int
    profile: str
    binding_share: float  # share of replications
    limiting_setting: str  # what sets a limiting pool's size
    binds: str  # a limiting pool's largest part of memory, or bounding setting (memory.py)
    memory: dict[str, int]  # bytes, by content
    shares: dict[str, float]  # of busy time at capacity (limits.py)
    bounds: dict[str, float]  # by criterion: ms, or share of arrivals
    share_criteria: tuple[str, ...]
    replications: tuple[float, ...]  # req/s
    num_requests: int  # of a replay
    block: int  # requests resampled together
    precision: float  # relative half-width asked for
    confidence: float
    rejected: float  # share of requests that never fit
    policy: str
    estimated: bool  # profile not measured
    latency_ms: dict[str, dict[str, float] | None]  # at capacity, by percentile; None: no values
    other_bounds: tuple[AtBound, ...] = ()  # the binding one 10 % tighter and looser; none without a curve
    cost: Cost | None = None
    asked_rate: float | None = None  # req/s to size replicas for
    one_fewer: Interval | None = None  # capacity with one replica less
    pools: tuple[PoolPart, ...] = ()  # shares and limits are the busiest pool's
    doubted: tuple[str, ...] = ()  # failed checks of profiles, and doubted steps that take much of the time
    interrupted: bool = False

    def page(self) -> Page:
        from ..report.capacity import capacity_page

        return capacity_page(self.to_json())

    def to_frame(self) -> "pd.DataFrame":
        """One row per rate (req/s); values in ms or share of arrivals."""
        return frame_of(self.to_json()["curve"])

    def to_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        data: dict[str, Any] = no_nan(asdict(self))
        return data


Progress = Callable[[int, Interval | None, int], None]  # replays done, interval if known, replicas


class Interrupted(Exception):  # noqa: N818  (as KeyboardInterrupt)
    """Ctrl-C, with the partial result; None before two replications."""

    def __init__(self, found: Capacity | None) -> None:
        super().__init__("interrupted")
        self.found = found


@dataclass(frozen=True)
class CapacityOptions:
    """Precision of a capacity search, price of a GPU, and where to run.

    SLOs of a class without a statistic must be met together by a share `attainment` of arrivals. `num_requests` (per
    replay) has a default. `jobs`, `ray`: see `Pool`.
    """

    precision: float = 0.02
    attainment: float = 0.99
    num_requests: int | None = None
    max_replications: int = MOST
    gpu_hour: float | None = None
    curve: bool = True
    jobs: int | None = None
    ray: str | None = None
    progress: Progress | None = None
    memo: Memo = field(default_factory=Memo)

    def __post_init__(self) -> None:
        if not 0.001 <= self.precision <= 0.5:
            raise DsimError(f"precision is {100 * self.precision:g}%, expected 0.1% to 50%")
        if not 0 < self.attainment <= 1:
            raise DsimError(f"attainment is {100 * self.attainment:g}%, expected above 0% and up to 100%")
        if self.max_replications < 2:
            raise DsimError(f"max replications is {self.max_replications}, expected at least 2")
        if self.gpu_hour is not None and not 0 <= self.gpu_hour < math.inf:
            raise DsimError(f"GPU hour is {self.gpu_hour}, expected a price of 0 or more")

    def pool(self) -> Pool:
        return Pool(self.jobs, self.ray)

    def search(self, scenario: Scenario) -> "CapacitySearch":
        scenario.check_fits()
        return search_of(scenario, self.precision, self.attainment, self.num_requests)


@dataclass(frozen=True)
class CapacitySearch:
    """A search's picklable input."""

    scenario: Scenario
    policy: str  # as given
    criteria: tuple[Criterion, ...]
    num_requests: int
    block: int

    def shortened(self, num: int | None = None) -> "CapacitySearch":
        """With replays of `num` requests; by default the pilot's."""
        if num is None:
            num = max(min(self.num_requests, PILOT_FEWEST), self.num_requests // PILOT_SHARE)
        return replace(self, num_requests=num, block=min(self.block, -(-num // PILOT_BLOCKS)))

    def requests(self, index: int, memo: Memo) -> Callable[[float], Reading]:
        """Replication `index` as a function of the rate."""
        drawn = cache(lambda: replication(self.scenario, index, self.num_requests, self.block))

        def measured(rate: float) -> list[Any]:
            own, requests = drawn()
            return list(vars(measure(own, self.criteria, requests, rate)).values())

        def read(rate: float) -> Reading:
            return Reading(*memo.replay(lambda: self.asked(index, rate, "reading"), lambda: measured(rate)))

        return read

    def asked(self, index: int, rate: float, of: str) -> Json:
        """A replay's inputs; of: kind of answer."""
        return self._asked | {"index": index, "at": rate, "of": of}

    @cached_property
    def _asked(self) -> Json:
        return asked_of(
            self.scenario, criteria=[criterion.text for criterion in self.criteria],
            num=self.num_requests, block=self.block,
        )  # fmt: skip


def question_of(
    scenario: Scenario, rate: float | None, replicas: int | None, max_replicas: int | None
) -> Callable[..., Capacity]:
    """A function of CapacityOptions' fields: a fleet's capacity, or for a rate (req/s) the fewest replicas.

    replicas: by default the policy file's, or 1.
    """
    if scenario.pools and replicas is not None:
        raise DsimError(f"pool is {scenario.pools[0]} and replicas is {replicas}, expected pools alone")
    if rate is None:
        if max_replicas is not None:
            raise DsimError(f"max replicas is {max_replicas}, expected a rate with it")
        own = 1 if scenario.pools else replicas_of([scenario.policy], replicas)
        return partial(capacity, replace(scenario, replicas=own))
    if replicas is not None:
        raise DsimError(f"rate is {rate:g} and replicas is {replicas}, expected one: a rate asks for the replicas")
    most = MAX_REPLICAS_TRIED if max_replicas is None else max_replicas
    if scenario.pools:
        from .capacity_pools import fewest_of_each_pool  # it imports this module

        return partial(fewest_of_each_pool, scenario, rate, max_replicas=most)
    return partial(fewest_replicas, replace(scenario, replicas=1), rate, max_replicas=most)


def capacity(scenario: Scenario, **how: Any) -> Capacity:
    """The highest rate at which the scenario's fleet meets all its `slos`, within `precision`, at 95 % confidence.

    how: fields of CapacityOptions. DsimError for an SLO met at no rate or at every rate. Ctrl-C raises Interrupted.
    """
    options = CapacityOptions(**how)
    search = options.search(scenario)
    with options.pool() as pool:
        return finish(Run(search, pool, options))


def fewest_replicas(scenario: Scenario, rate: float, *, max_replicas: int = MAX_REPLICAS_TRIED, **how: Any) -> Capacity:
    """The fewest replicas with a capacity of at least `rate` (req/s), by its interval's low end.

    `one_fewer`: interval with one replica less. how: fields of CapacityOptions.
    """
    options = CapacityOptions(**how)
    check_rate(rate, max_replicas)
    runs: dict[int, Run] = {}
    size = Fewest(most=max_replicas)
    with options.pool() as pool:
        while size.open:
            search = options.search(replace(scenario, replicas=size.at))
            done = max((run.num_replays for run in runs.values()), default=0)
            run = Run(search, pool, options, rate, done)
            runs[size.at] = run
            # Capacity is nearly proportional to replicas.
            size.decide(run.interval.low >= rate, math.ceil(size.at * rate / run.interval.value))
        if size.replicas is None:
            most = runs[max_replicas].interval
            raise DsimError(
                f"{max_replicas} replicas sustain {most.value:.3g} req/s ({most.low:.3g} to {most.high:.3g}), "
                f"expected at least {rate:g}: allow more, or relax the SLOs"
            )
        chosen = runs[size.replicas]
        chosen.num_replays = max(run.num_replays for run in runs.values())
        found = finish(chosen, rate)
        return replace(found, one_fewer=runs[size.low].interval if size.low else None)


def check_rate(rate: float, max_replicas: int) -> None:
    """rate: req/s."""
    check_traffic(rate)
    if not 1 <= max_replicas <= MAX_REPLICAS:
        raise DsimError(f"max replicas is {max_replicas}, expected 1 to {MAX_REPLICAS}")


class Run:
    """A fleet's search: a pilot finds the range, replications the value."""

    def __init__(
        self,
        search: CapacitySearch,
        pool: Pool,
        options: CapacityOptions,
        target: float | None = None,
        num_replays: int = 0,
    ) -> None:
        self.search, self.pool, self.options = search, pool, options
        self.memo, self.precision, self.most = options.memo, options.precision, options.max_replications
        self.target = target  # a rate: only find out on which side the capacity lies
        self.found: list[Found] = []
        self.num_replays = num_replays
        try:
            self.tell()
            [pilot] = self.memo.map(pool, _pilot, [search])
            self.num_replays += pilot.num_replays
            self.centre = pilot.rate
            self.slope = None if pilot.slope is None else Slope(pilot.slope, PILOT_DOUBT, pilot.binding)
            self.width = 2 * PILOT_SHARPNESS
            # Later replications start at earlier ones' capacity and slope: most take one replay.
            self._extend(TO_LEARN)
            self._extend(FIRST // 2)
            if self.interval.half_width > BY_FAR * self.precision:
                self._extend(FIRST)
            self.sharpen()
        except KeyboardInterrupt:
            raise self.interrupt() from None

    @property
    def interval(self) -> Interval:
        return interval([found.rate for found in self.found], CONFIDENCE)

    @property
    def binding(self) -> tuple[int, int]:
        """The criterion that binds in most replications (of ties, the first), and in how many."""
        return max(sorted(Counter(found.binding for found in self.found).items()), key=lambda item: item[1])

    def sharpen(self) -> None:
        """Add replications until the interval is narrow, or on one side of the target."""
        try:
            while len(self.found) < self.most:
                now, n = self.interval, len(self.found)
                aside = self.target is not None and not now.low <= self.target <= now.high
                if now.half_width <= self.precision or (n >= FIRST and aside):
                    return
                # The half-width falls with the root of the number. At most double it; keep it even.
                wanted = math.ceil(n * (now.half_width / self.precision) ** 2)
                self._extend(max(n + 2, min(wanted, 2 * n) + wanted % 2))
        except KeyboardInterrupt:
            raise self.interrupt() from None

    def interrupt(self) -> Interrupted:
        """Without a curve."""
        return Interrupted(None if len(self.found) < 2 else _result(self, {}, Limit("unknown"), (), {}))

    def tell(self) -> None:
        if self.options.progress is not None:
            known = self.interval if len(self.found) > 1 else None
            self.options.progress(self.num_replays, known, self.search.scenario.num_replicas)

    def _extend(self, num: int) -> None:
        """To `num` replications, or the most."""
        first = len(self.found)
        sharp = self.precision * SHARPNESS
        if first:
            spread = float(np.log([f.rate for f in self.found]).std(ddof=1))
            self.centre, self.width = self.interval.value, max(spread, self.precision / 2)
            sharp = max(self.precision, spread) * SHARPNESS
            self.slope = common_slope(self.found)
        own = partial(_own_capacity, self.search, self.centre, self.width, sharp, self.slope)
        for found in self.memo.map(self.pool, own, range(first, min(num, self.most))):
            self.found.append(found)
            self.num_replays += found.num_replays
            self.tell()


def _own_capacity(
    search: CapacitySearch, centre: float, width: float, sharp: float, slope: Slope | None, memo: Memo, index: int
) -> Found:
    """To a relative `sharp`."""
    return find(search.requests(index, memo), search.criteria, centre, width, sharp, slope)


def _pilot(memo: Memo, search: CapacitySearch) -> Found:
    """A rough capacity from short runs; DsimError if no rate is the capacity."""
    read = search.shortened().requests(PILOT, memo)
    flood = read(FLOOD).throughput
    idle = read(IDLE * flood)
    if not idle.holds:
        raise never(search.criteria, idle)
    found = find(read, search.criteria, PILOT_GUESS * flood, PILOT_WIDTH, PILOT_SHARPNESS)
    if found.binding < 0:
        overrun = search.requests(PILOT, memo)(BEYOND * found.rate)
        if overrun.worst < 0:
            names = " and ".join(quoted(criterion.text) for criterion in search.criteria)
            subject = f"SLOs {names} are" if len(search.criteria) > 1 else f"SLO {names} is"
            raise DsimError(
                f"{subject} met at every rate, even at {overrun.rate:.3g} req/s, {BEYOND:g} times the "
                f"{found.rate:.3g} req/s at which the queue of {search.num_requests} requests begins to grow without "
                "end: expected a bound that can bind"
            )
    return replace(found, num_replays=found.num_replays + 2 + (found.binding < 0))


def finish(run: Run, asked: float | None = None) -> Capacity:
    """The result, with its limit, curve and cost."""
    run.target = None
    run.sharpen()
    search, rate = run.search, run.interval.value
    gpu_hour, curve = run.options.gpu_hour, run.options.curve
    criteria, (binding, _) = search.criteria, run.binding
    scaled = tuple(criteria[binding].times(factor) for factor in OTHERS if curve and binding >= 0)
    wide = replace(search, criteria=criteria + scaled)
    try:
        # The first replay, at capacity, also gives the limit.
        work = [
            (share * rate, k) for share in GRID for k in range(CURVE_REPLICATIONS if share >= CURVE_NEAR else 1)
            if curve and (share, k) != (1.0, 0)
        ]  # fmt: skip
        answers: list[Any] = []
        for answer in run.memo.map(run.pool, partial(_last, wide), [(rate, None), *work]):
            answers.append(answer)
            run.num_replays += 1
            run.tell()
        seen, *others = answers
        readings: dict[float, list[Reading]] = {}
        for one in (Reading(*seen["reading"]), *others):
            readings.setdefault(one.rate, []).append(one)
        points = [_point(criteria, readings[at]) for at in sorted(readings)] if curve else []
    except KeyboardInterrupt:
        raise run.interrupt() from None
    parts = tuple(
        PoolPart(spec.name, spec.count, spec.count * own.profile.device.count, spec.policy, own.profile.name, **at)
        for at, (spec, own) in zip(seen["pools"], search.scenario.each_pool(), strict=False)  # none without pools
    )
    found = _result(run, seen["shares"], Limit(**seen["limit"]), tuple(points), seen["latency"])
    num = len(criteria)
    bounds = [_at_bound(c.text, {*range(num), num + k} - {binding}, readings) for k, c in enumerate(scaled)]
    found = replace(found, pools=parts, asked_rate=asked, other_bounds=tuple(bounds), doubted=tuple(seen["doubted"]))
    if gpu_hour is not None:
        gpus = search.scenario.num_gpus
        hourly = gpus * gpu_hour
        found = replace(found, cost=Cost(gpus, hourly, search.scenario.per_million_tokens(hourly, asked or rate)))
    return found


def _result(run: Run, shares: dict[str, float], limit: Limit, points: tuple[Point, ...], latency: Latency) -> Capacity:
    search, criteria = run.search, run.search.criteria
    profiles = {own.profile.name: own.profile for _, own in search.scenario.each_pool()}
    binding, count = run.binding
    return Capacity(
        rate=run.interval,
        replicas=search.scenario.num_replicas,
        binding_slo=STABILITY if binding < 0 else criteria[binding].text,
        binding_share=count / len(run.found),
        limited_by=limit.name,
        limiting_setting=limit.setting,
        binds=limit.binds,
        memory=dict(limit.memory),
        shares=shares,
        bounds={c.text: shown(c, c.bound) for c in criteria},
        share_criteria=tuple(c.text for c in criteria if c.share is not None),
        curve=points,
        replications=tuple(found.rate for found in run.found),
        num_replays=run.num_replays,
        num_requests=search.num_requests,
        block=search.block,
        precision=run.precision,
        confidence=CONFIDENCE,
        rejected=max(found.rejected for found in run.found),
        policy=search.policy,
        profile=", ".join(profiles),
        estimated=any(profile.is_estimate for profile in profiles.values()),
        latency_ms=latency,
        interrupted=not shares,
    )


def _at_capacity(search: CapacitySearch, rate: float) -> Json:
    """Shares of busy time, their limit, latencies (ms), the reading's fields, and each pool's part.

    With pools, shares and limit are the busiest one's.
    """
    own, at_1 = replication(search.scenario, 0, search.num_requests, search.block)
    requests = at_1.time_scaled(1 / rate)
    shares = PoolShares(own.fleet())
    result = own.simulate_whole(requests, shares.append)
    reading = judge(search.criteria, requests, result, rate, own.missing_passes)
    limits = shares.limits(result.totals.preemptions / len(requests))
    at = shares.busiest(result.totals.end)
    found, limit = shares.of[at].shares(), limits[at]
    pools: list[Json] = []
    if own.pools:
        limit = replace(limit, name=f"{limit.name} of pool {shares.pools[at].name}")
        pools = [
            {"busy": shares.busy(k, result.totals.end), "shares": shares.of[k].shares(), "limited_by": limits[k].name,
             "limiting_setting": limits[k].setting}
            for k in range(len(limits))
        ]  # fmt: skip
    seen = replicate.judged(len(requests))
    latency = latency_ms(rows_of(result.table.columns, seen), SEEN)
    return {
        "shares": found, "limit": asdict(limit), "latency": latency, "reading": list(vars(reading).values()),
        "pools": pools, "doubted": shares.doubted(),
    }  # fmt: skip


def latency_ms(requests: Columns, metrics: Sequence[str]) -> Latency:
    """Percentiles of latency metrics; None if no request has one."""
    values = latencies(requests)
    return {
        name: None if np.isnan(values[name]).all() else {s: statistic(1e3 * values[name], s) for s in STATS[1:]}
        for name in metrics
    }


def _last(search: CapacitySearch, memo: Memo, at: tuple[float, int | None]) -> Any:
    """A rate's reading in replication `index`; without an index `_at_capacity`."""
    rate, index = at
    if index is not None:
        return search.requests(index, memo)(rate)
    return memo.replay(lambda: search.asked(0, rate, "limits and reading"), lambda: _at_capacity(search, rate))


def _point(criteria: Sequence[Criterion], readings: Sequence[Reading]) -> Point:
    return Point(
        rate=readings[0].rate,
        values={c.text: shown(c, sum(r.values[i] for r in readings) / len(readings)) for i, c in enumerate(criteria)},
        stable=all(r.stable for r in readings),
        # A majority, like the capacity.
        holds=2 * sum(r.stable and max(r.severities[: len(criteria)]) <= 0 for r in readings) > len(readings),
    )


def _at_bound(slo: str, judged: Collection[int], readings: Mapping[float, Sequence[Reading]]) -> AtBound:
    """Where the worst severity of the `judged` criteria passes 0, on lines in the log rate."""
    rates = sorted(readings)
    means = [
        np.mean([max(-LIMIT, *(r.severities[i] for i in judged)) if r.stable else np.inf for r in readings[rate]])
        for rate in rates
    ]
    logs, severities = np.log(rates), np.maximum.accumulate(means)
    at = np.interp(0.0, severities, logs)
    side = "below" if severities[0] > 0 else "at least" if at in logs else ""
    return AtBound(slo, math.exp(at), side)


def shown(criterion: Criterion, value: float) -> float:
    """In ms; a share unchanged."""
    return value if criterion.share is not None else 1e3 * value


def search_of(scenario: Scenario, precision: float, attainment: float, num_requests: int | None) -> CapacitySearch:
    """The search with its defaults, checked."""
    for name in ("rate", "concurrency", "time_scale"):
        if (value := getattr(scenario, name)) is not None:
            raise DsimError(f"{name} is {value}, expected none: the search varies the rate")
    if not scenario.slos:
        raise DsimError("no SLO is given, expected at least one, such as p90:tpot_chunk=50ms")
    if scenario.replicas < 1:
        raise DsimError(f"replicas is {scenario.replicas}, expected at least 1")
    if scenario.scaler != FIXED:
        raise DsimError(f"scaler is {scenario.scaler}, expected pools of a fixed count: the search varies the rate")
    source = scenario.source()
    slos = [Slo.parse(text) for text in scenario.slos]
    for slo in slos:
        slo.check_class(classes(source) if scenario.lengths is None else ())
    criteria = criteria_of(slos, attainment)
    least = replicate.to_allow_a_miss(criteria)
    if num_requests is not None and not least <= num_requests <= MAX_REQUESTS:
        raise DsimError(f"number of requests is {num_requests}, expected {least} to {MAX_REQUESTS} a replay")
    if num_requests is None:
        longer = max(1.0, USUAL_PRECISION / precision)
        own_times = scenario.arrival == "trace"
        wanted = replicate.to_judge(len(source)) if own_times else len(source)
        most = int((WHOLE if own_times else MANY) * longer)
        num_requests = max(min(max(wanted, int(FEWEST * longer)), most), PER_REPLICA * scenario.num_replicas, least)
    seen = replicate.judged(num_requests)
    block = -(-min(seen.stop - seen.start, len(source)) // PARTS)
    return CapacitySearch(scenario.located(), scenario.label, criteria, num_requests, block)
