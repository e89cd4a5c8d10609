"""The highest rate at which a fleet meets all SLOs, with an interval, and the fewest replicas for a rate."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..engine.errors import DsimError
from ..files.read import quoted
from ..report.capacity_page import CURVE_NEAR, CURVE_REPLICATIONS
from ..report.page import Page
from ..report.result import Result, frame_of
from ..results.metrics import STATS, Columns, latencies, statistic
from ..results.slo import Slo
from ..results.world import MAX_REPLICAS, Setup, World, classes, on_profiles, setup_of
from ..sim.scalers import FIXED
from ..traces.trace import MAX_REQUESTS
from ..traces.trace import check_rate as check_traffic
from . import replicate
from .backend import Pool
from .contents import Json, asked_of
from .crossing import Crossing, Slope, common_slope, find, never
from .limits import PoolShares
from .memo import Memo, store_kind
from .race import LIMIT, Fewest
from .replicate import (
    CONFIDENCE,
    Criterion,
    Interval,
    Reading,
    broken,
    criteria_of,
    interval,
    measure,
    replication,
    share_texts,
)

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "dsim-capacity"
FILES = ("capacity.json", "report.html")
CAPACITY = store_kind("a capacity", SCHEMA, FILES, FILES[0])

FEWEST = 6000  # requests of a replay; with the next line, grows below USUAL_PRECISION
MANY, WHOLE = 10_000, 24_000  # most: with an arrival process, with the trace's times
USUAL_PRECISION = 0.02  # a run's ends bias it, a longer run less; must stay below the interval
PER_REPLICA = 1000  # least requests
PARTS = 4  # blocks in the trace, or in the judged requests
FIRST = 8  # replications before the first check; half if they agree
TO_LEARN = 2  # replications that give the others start and slope
BY_FAR = 0.25  # of the precision, accepted by an early check; more would stop too early too often
MOST = 64  # replications
MAX_REPLICAS_TRIED = 64
SHARPNESS = 0.5  # width of a capacity's bracket, by the precision or the spread
IDLE = 1e-3  # of saturation
BEYOND = 4.0  # times saturation: an SLO met there never binds
FLOOD = 1e9  # req/s, all at once
PILOT, PILOT_GUESS, PILOT_WIDTH, PILOT_SHARPNESS = 2**20, 0.8, 0.2, 0.03  # index; of the flood's rate; log rates
PILOT_SHARE, PILOT_FEWEST, PILOT_BLOCKS = 8, 500, 20  # share of requests, at least; blocks
GRID = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1)  # of the capacity, for the curve
SCALES = (0.9, 1.1)  # of the binding bound
CLIENT_METRICS = ("ttft", "tpot_chunk")  # latencies at capacity

Latency = dict[str, dict[str, float] | None]


@dataclass(frozen=True)
class Point:
    """A point of the curve: means, in ms or share of arrivals."""

    rate: float  # req/s
    values: dict[str, float | None]
    stable: bool  # in every replication
    holds: bool  # in most replications


@dataclass(frozen=True)
class AtBound:
    """The capacity with another bound, read from the curve's replays."""

    slo: str
    rate: float  # req/s
    side: str = ""  # "below" or "at least" at an end of the curve


@dataclass(frozen=True)
class PoolPart:
    """A pool at the fleet's capacity."""

    name: str
    replicas: int
    gpus: int  # of all replicas
    policy: str
    profile: str
    busy: float  # share of time spent in steps
    limited_by: str
    limiting_setting: str


@dataclass(frozen=True, repr=False)
class Capacity(Result):
    """A fleet's capacity under SLOs."""

    schema: ClassVar[str] = SCHEMA

    rate: Interval  # req/s
    replicas: int
    binding_slo: str  # the SLO broken above capacity; "stability": the queue grows first
    limited_by: str  # compute, KV memory, activation budget or host overhead
    curve: tuple[Point, ...]
    num_replays: int
    policy: str
    setup: Setup  # its profile: those of all pools
    binding_share: float  # share of replications
    limiting_setting: str  # what sets a limiting pool's size
    shares: Mapping[str, float]  # of busy time at capacity (limits.py)
    bounds: dict[str, float]  # by criterion: ms, or share of arrivals
    share_criteria: tuple[str, ...]
    replications: tuple[float, ...]  # req/s
    num_requests: int  # of a replay
    block: int  # requests resampled together
    precision: float  # relative half-width to reach
    confidence: float
    rejected: float  # share of requests that never fit
    latency_ms: Latency  # at capacity, by percentile; None: no values
    other_bounds: tuple[AtBound, ...] = ()  # the binding one 10 % tighter and looser; none without a curve
    target: float | None = None  # req/s to size replicas for
    pools: tuple[PoolPart, ...] = ()  # shares and limits are the busiest pool's
    doubted: tuple[str, ...] = ()  # failed checks of profiles, and doubted steps that take much of the time
    notes: tuple[str, ...] = ()

    def page(self) -> Page:
        from ..report.capacity_page import capacity_page

        return capacity_page(self)

    def to_frame(self) -> "pd.DataFrame":
        """One row per rate (req/s); values in ms or share of arrivals."""
        return frame_of(self.to_json()["curve"])


Progress = Callable[[int, Interval | None, int], None]  # replays done, interval if known, replicas


@dataclass(frozen=True)
class CapacitySearch:
    """A search's picklable input."""

    world: World
    criteria: tuple[Criterion, ...]
    num_requests: int
    block: int

    def shortened(self, num: int | None = None) -> "CapacitySearch":
        """With replays of `num` requests; by default the pilot's."""
        if num is None:
            num = max(min(self.num_requests, PILOT_FEWEST), self.num_requests // PILOT_SHARE)
        return replace(self, num_requests=num, block=min(self.block, -(-num // PILOT_BLOCKS)))

    def requests(self, index: int) -> Callable[[float], Reading]:
        """Replication `index` as a function of the rate."""
        drawn = cache(lambda: replication(self.world, index, self.num_requests, self.block))

        def read(rate: float) -> Reading:
            world, requests = drawn()
            return measure(world, self.criteria, requests, rate)[0]

        return read

    @cached_property
    def inputs(self) -> Json:
        """What tells the answers of its replays."""
        texts = [criterion.text for criterion in self.criteria]
        return asked_of(self.world, criteria=texts, num=self.num_requests, block=self.block)


def search_of(world: World, precision: float, attainment: float, num_requests: int | None) -> CapacitySearch:
    """The search with its defaults, checked."""
    for name in ("rate", "concurrency"):
        if (value := getattr(world, name)) is not None:
            raise DsimError(f"{name} is {value}, expected none: the search varies the rate")
    if not world.slos:
        raise DsimError("no SLO is given, expected at least one, such as p90:tpot_chunk=50ms")
    if world.replicas < 1:
        raise DsimError(f"replicas is {world.replicas}, expected at least 1")
    if world.scaler != FIXED:
        raise DsimError(f"scaler is {world.scaler}, expected pools of a fixed count: the search varies the rate")
    source = world.source()
    slos = [Slo.parse(text) for text in world.slos]
    for slo in slos:
        slo.check_class(classes(source) if world.lengths is None else ())
    criteria = criteria_of(slos, attainment)
    least = replicate.to_allow_a_miss(criteria)
    if num_requests is not None and not least <= num_requests <= MAX_REQUESTS:
        raise DsimError(f"number of requests is {num_requests}, expected {least} to {MAX_REQUESTS} a replay")
    if num_requests is None:
        longer = max(1.0, USUAL_PRECISION / precision)
        length, limit = len(source), MANY
        if world.arrival == "trace":
            length, limit = replicate.to_judge(length), WHOLE
        num_requests = min(max(length, int(FEWEST * longer)), int(limit * longer))
        num_requests = max(num_requests, PER_REPLICA * world.num_replicas, least)
    judged = replicate.judged(num_requests)
    block = -(-min(judged.stop - judged.start, len(source)) // PARTS)
    return CapacitySearch(world=world.located(), criteria=criteria, num_requests=num_requests, block=block)


def capacity(world: World, *, jobs: int | None = None, ray: str | None = None, **options: Any) -> Capacity:
    """The highest rate at which the world's fleet meets all its `slos`, within `precision`, at 95 % confidence.

    jobs, ray: see `Pool`. options: of Run. DsimError for an SLO met at no rate or at every rate.
    """
    with Pool(jobs, ray) as pool:
        run = Run(world, pool, **options)
        run.start()
        return run.finish()


def fewest_replicas(world: World, rate: float, *, max_replicas: int = MAX_REPLICAS_TRIED, **options: Any) -> Capacity:
    """The fewest replicas with a capacity of surely at least `rate` (req/s). options: of `capacity`."""
    check_rate(rate, max_replicas)
    runs: dict[int, Run] = {}
    size = Fewest(limit=max_replicas)
    options = {"memo": Memo(), **options}
    with Pool(options.pop("jobs", None), options.pop("ray", None)) as pool:
        while size.open:
            fleet = replace(world, replicas=size.trial)
            run = runs[size.trial] = Run(fleet, pool, target=rate, **options)
            rates = run.start()
            # Capacity is nearly proportional to replicas.
            size.decide(rates.low >= rate, math.ceil(size.trial * rate / rates.value))
        if size.replicas is None:
            largest = runs[max_replicas].interval
            sustained = f"{largest.value:.3g} req/s ({largest.low:.3g} to {largest.high:.3g})"
            raise DsimError(f"{max_replicas} replicas sustain {sustained}, expected at least {rate:g}")
        return runs[size.replicas].finish()


def check_rate(rate: float, max_replicas: int) -> None:
    """rate: req/s."""
    check_traffic(rate)
    if not 1 <= max_replicas <= MAX_REPLICAS:
        raise DsimError(f"max replicas is {max_replicas}, expected 1 to {MAX_REPLICAS}")


@dataclass
class Run:
    """A fleet's search: a pilot finds the range, replications the value.

    `target`: a rate; only find out on which side the capacity lies. SLOs of a class without a statistic must be met
    together by a share `attainment` of arrivals. `num_requests` (per replay) has a default. `command`: of
    the setup. `memo`: counts the replays.
    """

    world: World
    pool: Pool
    _: KW_ONLY
    target: float | None = None  # req/s
    precision: float = USUAL_PRECISION
    attainment: float = 0.99
    num_requests: int | None = None
    max_replications: int = MOST
    curve: bool = True
    command: str = ""
    progress: Progress = lambda num_replays, interval, replicas: None
    memo: Memo = field(default_factory=Memo)
    crossings: list[Crossing] = field(default_factory=list)  # by replication

    def __post_init__(self) -> None:
        if not 0.001 <= self.precision <= 0.5:
            raise DsimError(f"precision is {100 * self.precision:g}%, expected 0.1% to 50%")
        if not 0 < self.attainment <= 1:
            raise DsimError(f"attainment is {100 * self.attainment:g}%, expected above 0% and up to 100%")
        if self.max_replications < 2:
            raise DsimError(f"max replications is {self.max_replications}, expected at least 2")
        self.world.check_fits()
        self.search = search_of(self.world, self.precision, self.attainment, self.num_requests)

    def start(self) -> Interval:
        """The capacity, as exactly as its side of the target needs."""
        self.report()
        # Later replications start at earlier ones' capacity and slope: most take one replay.
        [pilot] = self.answers(_pilot, [None])
        self._replicate(TO_LEARN, Crossing(**pilot).rate, 2 * PILOT_SHARPNESS, self.precision, None)
        self._extend(FIRST // 2)
        if self.interval.half_width > BY_FAR * self.precision:
            self._extend(FIRST)
        self._sharpen(self.target)
        return self.interval

    @property
    def interval(self) -> Interval:
        return interval([crossing.rate for crossing in self.crossings])

    def finish(self) -> Capacity:
        """The result, with its limit, curve and cost."""
        search, criteria = self.search, self.search.criteria
        self._sharpen(None)
        rate = self.interval
        # The criterion that binds in most replications; of ties, the first.
        bindings = sorted(Counter(crossing.binding for crossing in self.crossings).items())
        binding, num_bound = max(bindings, key=lambda item: item[1])
        # The first replay, at capacity, also gives the limit.
        cells: list[tuple[float, int | None]] = [(rate.value, None)]
        for share in GRID * self.curve:
            indices = range(CURVE_REPLICATIONS if share >= CURVE_NEAR else 1)
            cells += [(share * rate.value, index) for index in indices if (share, index) != (1.0, 0)]
        scaled = [criteria[binding].times(scale) for scale in SCALES * (self.curve and binding >= 0)]
        first, *answers = self.answers(at_rate, cells, replace(search, criteria=(*criteria, *scaled)))
        readings = [Reading(**answer) for answer in (first["reading"], *answers)]
        curve: dict[float, list[Reading]] = {}  # in the order of rates
        for reading in sorted(readings, key=lambda reading: reading.rate):  # stable
            curve.setdefault(reading.rate, []).append(reading)
        other_bounds = []
        for index, criterion in enumerate(scaled, len(criteria)):
            judged = {*range(len(criteria)), index} - {binding}
            other_bounds.append(_at_bound(criterion.text, judged, curve))
        settings = list(self.world.each_pool())
        pools = []
        for facts, (spec, setting) in zip(first["pools"], settings, strict=False):  # none without pools
            profile, gpus = setting.profile, spec.count * setting.profile.device.count
            pools.append(PoolPart(spec.name, spec.count, gpus, policy=spec.policy, profile=profile.name, **facts))
        return Capacity(
            rate=rate,
            replicas=search.world.num_replicas,
            binding_slo=broken(criteria, binding),
            binding_share=num_bound / len(self.crossings),
            limited_by=first["limit"]["name"],
            limiting_setting=first["limit"]["setting"],
            shares=first["shares"],
            bounds={criterion.text: in_units(criterion, criterion.bound) for criterion in criteria},
            share_criteria=share_texts(criteria),
            curve=tuple(_point(criteria, readings) for readings in curve.values()) * self.curve,
            other_bounds=tuple(other_bounds),
            replications=tuple(crossing.rate for crossing in self.crossings),
            num_replays=self.memo.num_replays,
            num_requests=search.num_requests,
            block=search.block,
            precision=self.precision,
            confidence=CONFIDENCE,
            rejected=max(crossing.rejected for crossing in self.crossings),
            policy=self.world.label,
            setup=on_profiles(setup_of(self.world, self.command, None, ""), (s.profile for _, s in settings)),
            latency_ms=first["latency"],
            target=self.target,
            pools=tuple(pools),
            doubted=tuple(first["doubted"]),
        )

    def report(self) -> None:
        rates = self.interval if len(self.crossings) > 1 else None
        self.progress(self.memo.num_replays, rates, self.search.world.num_replicas)

    def _sharpen(self, target: float | None) -> None:
        """Add replications until the interval is narrow, or on one side of the target."""
        while (num := len(self.crossings)) < self.max_replications:
            now = self.interval
            aside = target is not None and not now.low <= target <= now.high
            if now.half_width <= self.precision or (num >= FIRST and aside):
                return
            # The half-width falls with the root of the number. At most double it; keep it even.
            enough = math.ceil(num * (now.half_width / self.precision) ** 2)
            self._extend(max(num + 2, min(enough, 2 * num) + enough % 2))

    def _extend(self, num: int) -> None:
        """To `num` replications, or the most, by what the first ones show."""
        spread = float(np.log([crossing.rate for crossing in self.crossings]).std(ddof=1))
        width, sharp = max(spread, self.precision / 2), max(self.precision, spread)
        self._replicate(num, self.interval.value, width, sharp, common_slope(self.crossings))

    def _replicate(self, num: int, centre: float, width: float, sharp: float, slope: Slope | None) -> None:
        """To `num` replications, or the most; arguments as of `find`."""
        new = range(len(self.crossings), min(num, self.max_replications))
        cells = [(index, centre, width, SHARPNESS * sharp, slope) for index in new]
        for answer in self.answers(_crossing, cells):
            self.crossings.append(Crossing(**answer))
            self.report()

    def answers(
        self, work: Callable[[CapacitySearch, Any], Json], cells: Sequence[Any], search: CapacitySearch | None = None
    ) -> Iterator[Json]:
        """The work's answer for each cell, in order; search: by default the run's."""
        search = search or self.search

        def question(cell: Any) -> Json:
            return {**search.inputs, "work": work.__name__, "cell": repr(cell)}

        for answer in self.memo.map(self.pool, partial(work, search), cells, question):
            self.memo.num_replays += answer.get("num_replays", 1)
            self.report()
            yield answer


def _crossing(search: CapacitySearch, cell: tuple[int, float, float, float, Slope | None]) -> Json:
    """cell: a replication, and arguments of `find`."""
    index, centre, width, sharp, slope = cell
    return asdict(find(search.requests(index), search.criteria, centre, width, sharp, slope))


def _pilot(search: CapacitySearch, _: None) -> Json:
    """A rough capacity from short runs; DsimError if no rate is the capacity."""
    read = search.shortened().requests(PILOT)
    flood = read(FLOOD).throughput
    idle = read(IDLE * flood)
    if not idle.holds:
        raise never(search.criteria, idle)
    crossing = find(read, search.criteria, PILOT_GUESS * flood, PILOT_WIDTH, PILOT_SHARPNESS)
    num_replays = crossing.num_replays + 2
    if crossing.binding < 0:
        num_replays += 1
        overrun = search.requests(PILOT)(BEYOND * crossing.rate)
        if overrun.worst < 0:
            names = " and ".join(quoted(criterion.text) for criterion in search.criteria)
            raise DsimError(
                f"every rate meets {names}, even {overrun.rate:.3g} req/s, {BEYOND:g} times the "
                f"{crossing.rate:.3g} req/s at which the queue of {search.num_requests} requests begins to grow "
                "without end: expected a bound that can bind"
            )
    return asdict(replace(crossing, num_replays=num_replays))


def at_rate(search: CapacitySearch, cell: tuple[float, int | None]) -> Json:
    """A reading of a replication at a rate; without a replication `_at_capacity`."""
    rate, index = cell
    if index is None:
        return _at_capacity(search, rate)
    return vars(search.requests(index)(rate))


def _at_capacity(search: CapacitySearch, rate: float) -> Json:
    """Shares of busy time, their limit, latencies (ms), the reading, and each pool's part.

    With pools, shares and limit are the busiest one's.
    """
    world, requests = replication(search.world, 0, search.num_requests, search.block)
    shares = PoolShares(world.fleet())
    reading, records, window = measure(world, search.criteria, requests, rate, shares.append)
    limits = shares.limits(records.totals.preemptions / len(requests))
    end = records.totals.end
    busiest = shares.busiest(end)
    limit, pools = limits[busiest], []
    if world.pools:
        limit = replace(limit, name=f"{limit.name} of pool {shares.pools[busiest].name}")
        for k, bound in enumerate(limits):
            pools.append({"busy": shares.busy(k, end), "limited_by": bound.name, "limiting_setting": bound.setting})
    answer: Json = {"shares": shares.by_pool[busiest].shares(), "limit": asdict(limit), "reading": vars(reading)}
    return {**answer, "pools": pools, "latency": latency_ms(window, CLIENT_METRICS), "doubted": shares.doubted()}


def latency_ms(requests: Columns, metrics: Sequence[str]) -> Latency:
    """Percentiles of latency metrics; None if no request has one."""
    values = latencies(requests)
    return {
        name: None if np.isnan(values[name]).all() else {s: statistic(1e3 * values[name], s) for s in STATS[1:]}
        for name in metrics
    }


def _point(criteria: Sequence[Criterion], readings: Sequence[Reading]) -> Point:
    good = [r for r in readings if r.stable and max(r.severities[: len(criteria)]) <= 0]
    return Point(
        rate=readings[0].rate,
        values=means(criteria, readings),
        stable=all(reading.stable for reading in readings),
        holds=2 * len(good) > len(readings),  # a majority, like the capacity
    )


def _at_bound(slo: str, judged: Collection[int], curve: Mapping[float, Sequence[Reading]]) -> AtBound:
    """Where the worst severity of the `judged` criteria passes 0, on lines in the log rate. Rates rise."""
    severities = []
    for readings in curve.values():
        worst = [max(-LIMIT, *(reading.severities[i] for i in judged)) for reading in readings if reading.stable]
        severities.append(np.mean([*worst, *[np.inf] * (len(readings) - len(worst))]))
    logs, rising = np.log([*curve]), np.maximum.accumulate(severities)
    log_rate = np.interp(0.0, rising, logs)
    side = "below" if rising[0] > 0 else "at least" * (log_rate in logs)
    return AtBound(slo, math.exp(log_rate), side)


def means(criteria: Sequence[Criterion], readings: Sequence[Reading]) -> dict[str, float | None]:
    """By criterion, in ms or share of arrivals; None: no request has the metric."""
    values: dict[str, float | None] = dict.fromkeys(criterion.text for criterion in criteria)
    for i, criterion in enumerate(criteria):
        mean = sum(reading.values[i] for reading in readings) / len(readings)
        if not math.isnan(mean):
            values[criterion.text] = in_units(criterion, mean)
    return values


def in_units(criterion: Criterion, value: float) -> float:
    """In ms; a share unchanged."""
    if criterion.share is None:
        value *= 1e3
    return value
