"""Capacity against queues whose capacity is known, and the search that finds it."""

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dsim.engine.spec import parse
from dsim.planner.capacity import AtBound, Capacity, CapacitySearch, _at_bound, capacity, fewest_replicas
from dsim.planner.crossing import Crossing, Slope, common_slope, find
from dsim.planner.limits import Limit, device_time, limited_by
from dsim.planner.replicate import COOLDOWN, WARMUP, Reading, criteria_of
from dsim.profiler.profile import load, save
from dsim.results.run import counters_of
from dsim.results.slo import Slo
from dsim.results.world import World
from dsim.sim.setting import Setting
from dsim.traces import synth, write

from ..checks import cases, refused
from ..worlds import Collector, doubting, second_profile

MEAN = "mean:e2el=2s"


@pytest.fixture
def md1() -> World:
    """A server of constant service of 1 s with Poisson arrivals."""
    return World(
        "azure-conv", "ar,max_batch=1", second_profile(Path.cwd()), arrival="poisson", lengths="fixed:1,1", slos=(MEAN,)
    )


def md1_capacity(bound: float) -> float:
    """The rate at which the mean stay 1 + rho / (2 (1 - rho)) is `bound` (s), for a service of 1 s."""
    x = 2 * (bound - 1)
    return x / (1 + x)


def lindley(search: CapacitySearch) -> Callable[[int], Callable[[float], Reading]]:
    """The same queue by Lindley's recursion, which the twin reproduces to the digit (tests/sim/test_queues.py)."""

    def requests(index: int) -> Callable[[float], Reading]:
        n = search.num_requests
        rng = np.random.default_rng([search.world.seed, index])
        base = np.concatenate(([0.0], np.cumsum(rng.exponential(size=n - 1))))
        base *= (n - 1) / base[-1]
        bound = search.criteria[0].bound

        def read(rate: float) -> Reading:
            drift = np.concatenate(([0.0], np.cumsum(1 / search.world.replicas - np.diff(base) / rate)))
            stay = drift - np.minimum.accumulate(drift) + 1
            value = float(stay[int(WARMUP * n) : n - int(COOLDOWN * n)].mean())
            return Reading(rate, (value,), (math.log(value / bound),), True, search.world.replicas, 0.0)

        return read

    return requests


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches run on Lindley's recursion: the interval's coverage needs hundreds of them."""
    monkeypatch.setattr(CapacitySearch, "requests", lambda self, index: lindley(self)(index))
    module = sys.modules[CapacitySearch.__module__]
    limit = asdict(Limit("compute"))

    def at_capacity(search: CapacitySearch, rate: float) -> dict[str, Any]:
        reading = vars(lindley(search)(0)(rate))
        found = {"shares": {"decode": 1.0}, "limit": limit, "latency": {}, "reading": reading}
        return {**found, "pools": [], "doubted": []}

    monkeypatch.setattr(module, "_at_capacity", at_capacity)


def quick(world: World, **options: Any) -> Capacity:
    return capacity(world, jobs=1, curve=False, **options)


def test_the_capacity_of_the_twin_is_the_closed_form_of_m_d_1(md1: World) -> None:
    found = quick(md1, num_requests=1000, precision=0.1)
    assert found.rate.low < md1_capacity(2.0) < found.rate.high
    assert found.rate.half_width <= found.precision
    assert (found.binding_slo, found.limited_by) == (MEAN, "activation budget")
    assert found.limiting_setting == "max_batch=1"
    assert found.setup.estimated


def test_steps_that_no_held_out_one_judged_are_said_where_a_tenth_of_the_time_goes(md1: World) -> None:
    save(doubting(load(md1.profile), "prefills (2 to 8 sequences)"), md1.profile, force=True)
    found = quick(md1, num_requests=100, precision=0.5)
    assert found.page().answer.endswith(
        "; second doubts parts of ar,max_batch=1's busy time, 100 % in prefills (1 sequence): never judged"
    )


@pytest.mark.usefixtures("fast")
@cases("bound", 1.5, 2.0)
def test_the_interval_covers_the_truth_as_often_as_it_says(md1: World, bound: float) -> None:
    num, truth = 60, md1_capacity(bound)
    worlds = [replace(md1, seed=seed, slos=(f"mean:e2el={bound}s",)) for seed in range(num)]
    found = [quick(world).rate for world in worlds]
    covered = sum(f.low <= truth <= f.high for f in found)
    # 57 are expected of 60; fewer than 52 come of a level of 95 % once in 350 times.
    assert covered >= 52
    assert all(f.half_width <= 0.02 for f in found)
    # What bias a finite run has is far below the interval.
    assert np.mean([f.value for f in found]) == pytest.approx(truth, rel=0.004)


@pytest.mark.usefixtures("fast")
def test_a_narrower_interval_takes_more_replications_and_longer_replays(md1: World) -> None:
    wide, narrow = quick(md1, precision=0.05), quick(md1, precision=0.01)
    assert narrow.rate.half_width <= 0.01
    assert len(narrow.replications) >= len(wide.replications)
    assert narrow.num_requests > wide.num_requests


def test_a_flood_that_no_bound_stops_is_limited_by_stability(md1: World) -> None:
    found = quick(replace(md1, slos=("mean:e2el=60s",)), num_requests=500, precision=0.2)
    # The server saturates at 1 req/s; the bound holds up to 0.99.
    assert (found.binding_slo, found.rate.value) == ("stability", pytest.approx(1.0, rel=0.08))
    assert found.limited_by == "activation budget"


def test_the_same_seed_gives_the_same_numbers_whatever_the_jobs_and_a_curve_through_the_bound(md1: World) -> None:
    one, two = (capacity(md1, num_requests=200, precision=0.4, jobs=jobs) for jobs in (1, 2))
    assert one == two
    other = quick(replace(md1, seed=1), num_requests=200, precision=0.4)
    assert other.rate != one.rate
    values = [point.values[MEAN] for point in one.curve]
    assert values == sorted(values)
    assert one.curve[0].holds
    assert not one.curve[-1].holds
    assert one.bounds == {MEAN: 2000.0}
    assert values[0] < 2000 < values[-1]
    others = {other.slo: other.rate / one.rate.value for other in one.other_bounds}
    known = {f"mean:e2el={bound:g}ms": md1_capacity(bound / 1e3) / md1_capacity(2.0) for bound in (1800, 2200)}
    assert others == pytest.approx(known, rel=0.1)


@pytest.mark.usefixtures("fast")
def test_the_fewest_replicas_are_enough_and_one_less_is_not(md1: World) -> None:
    # Servers that share one queue in the recursion: N of them sustain a little more than N times one's rate.
    found = fewest_replicas(md1, 2.5, jobs=1, curve=False)
    assert found.rate.low >= 2.5
    assert quick(replace(md1, replicas=found.replicas - 1)).rate.low < 2.5
    assert fewest_replicas(md1, 0.1, jobs=1, curve=False).replicas == 1
    with refused(r"^2 replicas sustain 1\.\d+ req/s \(.*\), expected at least 50$"):
        fewest_replicas(md1, 50.0, max_replicas=2, jobs=1)


CRITERIA = criteria_of([Slo.parse("mean:ttft=1s")], 0.99)


def cubic(rate: float, saturation: float = math.inf) -> Reading:
    """A mean that grows with the third power of the rate, and is at its bound at 2 req/s."""
    return Reading(rate, (rate**3 / 8,), (3 * math.log(rate / 2),), rate < saturation, saturation, 0.0)


def test_find_brackets_the_rate_at_which_a_criterion_fails() -> None:
    for centre in (0.01, 1.9, 2.0, 2.2, 300.0):
        read = mock.Mock(side_effect=cubic)
        crossing = find(read, CRITERIA, centre, 0.05, 0.005)
        assert crossing.rate == pytest.approx(2.0, rel=0.003)
        assert read.call_count == crossing.num_replays <= (4 if 1.8 < centre < 2.3 else 16)


@cases("value replays", (3.0, 1), (2.8, 1), (-3.0, 3))
def test_a_slope_of_other_replications_spares_replays(value: float, replays: int) -> None:
    for centre in (1.98, 2.02):
        found = find(cubic, CRITERIA, centre, 0.05, 0.01, Slope(value, 0))
        assert (found.num_replays, found.rate) == (replays, pytest.approx(2.0, rel=0.0025))


def found_with(*near: tuple[float, float], binding: int = 0) -> Crossing:
    return Crossing(rate=1.0, binding=binding, rejected=0.0, num_replays=len(near), near=near)


def test_the_common_slope_is_that_of_parallel_lines_through_each_replications_readings() -> None:
    rising = [found_with((0.1, 0.3), (0.2, 0.6)), found_with((9.0, 0.0))]
    assert common_slope(rising) is None  # too few readings
    rising.append(found_with((0.0, -1.0), (0.2, -0.4)))
    assert common_slope(rising) == Slope(pytest.approx(3.0), 0)
    assert common_slope([found_with((0.0, 1.0), (0.1, 0.7)), found_with((0.0, 1.0), (0.1, 0.9))]) is None  # it falls
    assert common_slope([*rising, found_with((0.0, 1.0), (0.1, 1.3), binding=1)]) is None


def test_the_capacity_at_another_bound_is_read_on_a_line_in_the_log_rate() -> None:
    def at_bound(*severities: float) -> AtBound:
        points = zip((1.0, 4.0), severities, strict=True)
        readings = {rate: [Reading(rate, (), (9.0, s), s < math.inf, rate, 0.0)] for rate, s in points}
        return _at_bound("slo", [1], readings)

    assert at_bound(-1.0, 1.0) == AtBound("slo", pytest.approx(2.0), "")
    assert at_bound(0.1, 1.0) == AtBound("slo", 1.0, "below")
    assert at_bound(-1.0, -0.1) == AtBound("slo", 4.0, "at least")
    assert at_bound(-1.0, math.inf) == AtBound("slo", 1.0, "at least")  # the queue grows


def test_a_slope_is_not_trusted_where_the_queue_grows_first() -> None:
    for centre in (1.5, 1.88, 1.95, 2.5):
        found = find(partial(cubic, saturation=1.9), CRITERIA, centre, 0.05, 0.01)
        assert (found.rate, found.binding) == (pytest.approx(1.9, rel=0.01), -1)


def test_a_queue_that_grows_in_a_short_run_is_no_slower_than_where_all_held() -> None:
    def tailed(rate: float) -> Reading:  # the last requests leave alone: half the throughput
        return replace(cubic(rate, saturation=1.9), throughput=0.95)

    assert find(tailed, CRITERIA, 2.0, 0.05, 0.01).rate == pytest.approx(1.9, rel=0.03)


def test_each_class_is_held_to_its_own_bound(md1: World) -> None:
    trace = synth("poisson", 1.0, lengths="fixed:1,1", num_requests=300, seed=1)
    write(replace(trace, extras={"slo_class": ["chat" if i % 3 else "batch" for i in range(300)]}), "two.csv")
    both = replace(md1, trace="two.csv", arrival="trace", lengths=None)

    def of(*slos: str) -> Capacity:
        return quick(replace(both, slos=slos), num_requests=200, precision=0.4)

    strict = of("chat/mean:e2el=1500ms", "batch/mean:e2el=9s")
    loose = of("chat/mean:e2el=9s", "batch/mean:e2el=9s")
    assert strict.binding_slo == "chat/mean:e2el=1500ms"
    assert strict.rate.high < loose.rate.low
    with refused("no request is of class 'video': the trace holds batch, chat"):
        of("video/ttft=1s")


@cases(
    "given how says",
    ({"slos": ("mean:e2el=900ms",)}, {}, "SLO 'mean:e2el=900ms' holds at no rate: mean of e2el is 1,00"),
    ({"slos": ("mean:e2el=99999s",)}, {}, "every rate meets 'mean:e2el=99999s', even "),
    ({"slos": ()}, {}, "no SLO is given, expected at least one, such as p90:tpot_chunk=50ms"),
    ({"slos": ("chat/ttft=2s",)}, {}, "SLO 'chat/ttft=2s': no request is of class 'chat': the trace holds no "),
    ({"rate": 2.0}, {}, "rate is 2.0, expected none: the search varies the rate"),
    ({}, {"precision": 0.0}, "precision is 0%, expected 0.1% to 50%"),
    ({}, {"num_requests": 3}, "number of requests is 3, expected 100 to 10000000 a replay"),
)  # fmt: skip
def test_what_says_nothing_or_is_out_of_range_is_refused_in_one_line(
    md1: World, given: dict[str, Any], how: dict[str, Any], says: str
) -> None:
    with refused() as error:
        quick(replace(md1, **given), **({"num_requests": 200} | how))
    assert str(error.value).startswith(says)


def test_a_rate_or_a_limit_of_replicas_out_of_range_is_told_both_sides(md1: World) -> None:
    for rate in (0.0, -1.0, math.nan, math.inf):
        with refused(f"rate is {rate} req/s, expected above 0 and finite"):
            fewest_replicas(md1, rate)
    with refused("max replicas is 0, expected 1 to 4096"):
        fewest_replicas(md1, 1.0, max_replicas=0)


EAGER, GRAPHS = "a100-sdar-8b", "a100-sdar-8b/graphs"


@cases(
    "profile lengths slo policy more limit setting",
    (EAGER, "fixed:1000,1", "p90:ttft=4s", "chunk:8", "device", "compute", ""),
    (EAGER, "fixed:200,64", "p90:e2el=3800ms", "chunk:8", "launch", "host overhead", ""),
    (GRAPHS, "fixed:200,64", "p90:e2el=8s", "chunk:8,num_pages=40", "num_pages=160", "KV memory", "num_pages=40"),
    (GRAPHS, "fixed:200,64", "p90:e2el=8s", "chunk:8,max_batch=4", "max_batch=8",
     "activation budget", "max_batch=4"),
)  # fmt: skip
def test_more_of_what_limits_is_more_capacity(
    profile: str, lengths: str, slo: str, policy: str, more: str, limit: str, setting: str
) -> None:
    base = World("azure-conv", policy, profile, arrival="poisson", lengths=lengths, slos=(slo,))
    found = quick(base, num_requests=300, precision=0.4)
    assert (found.limited_by, found.limiting_setting) == (limit, setting)
    if "=" in more:
        field = more.partition("=")[0]
        kept = [item for item in policy.split(",") if not item.startswith(field)]
        relaxed = replace(base, policy=",".join([*kept, more]))
    else:
        own = load(profile)
        model = own.latency
        if more == "launch":
            faster = replace(model, launch=model.launch / 2)
        else:
            knots = tuple((x, y / 2) for x, y in model.knots)
            halves = {name: getattr(model, name) / 2 for name in ("slope", "attention", "kv_read", "head", "sample")}
            faster = replace(model, knots=knots, **halves)
        save(replace(own, name="faster", latency=faster), "faster.json")
        relaxed = replace(base, profile="faster.json")
    assert quick(relaxed, num_requests=300, precision=0.4).rate.value > 1.25 * found.rate.value


def test_limits_are_read_from_where_the_time_goes() -> None:
    policy, profile = parse("chunk:8"), load(EAGER)
    pools = ("waiting for pages", "waiting for rows", "cut prefills")
    shares = dict.fromkeys(("decode", "prefill", "host", *pools), 0.0)

    def limit(preemptions: float = 0.0, **given: float) -> str:
        named = {name.replace("_", " "): share for name, share in given.items()}
        return limited_by(shares | named, preemptions, Setting(policy, profile)).name

    assert limit(decode=0.4, prefill=0.15, host=0.45) == "compute"
    assert limit(decode=0.3, prefill=0.15, host=0.55) == "host overhead"
    assert limit(decode=0.9, waiting_for_rows=0.5) == "activation budget"
    assert limit(decode=0.9, waiting_for_rows=0.5, waiting_for_pages=0.6) == "KV memory"
    assert limit(decode=0.9, waiting_for_rows=0.5, waiting_for_pages=0.4) == "activation budget"
    assert limit(prefill=0.9, cut_prefills=0.3) == "activation budget"
    assert limit(prefill=0.9, cut_prefills=0.2) == "compute"
    assert limit(prefill=0.9, preemptions=0.2) == "KV memory"


# On the A100 the host's launches hide what focus evicts.
@cases(
    "policy profile",
    ("optimus", "a100-sdar-8b"),
    ("sglang-sync", "h100-sdar-8b"),  # a round's later steps take none of the host's time
    pytest.param("focus", "a100-sdar-8b", marks=pytest.mark.slow),
    pytest.param("focus", "h100-sdar-8b", marks=pytest.mark.slow),
)
def test_the_devices_time_is_the_latency_models_less_the_hosts(policy: str, profile: str) -> None:
    world = World("azure-conv", policy=policy, profile=profile)
    model = world.loaded_profile().latency
    journal = Collector()
    world.simulate(world.source().head(40), append=journal)
    device = device_time(model, counters_of(journal.steps))
    steps = journal.steps
    n = steps["num_forwards"]
    host = n * model.host_step + model.host_request * steps["batch"]
    latency = np.maximum(n * model.launch, device) + np.where(steps["continues"], 0.0, host)
    latency += model.eviction * steps["evicting"]
    assert np.allclose(latency, steps["latency"], rtol=1e-9)
