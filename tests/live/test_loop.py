"""The live driver with a stub in the device's place: its journal replays, and on an exact clock it is the twin's."""

import itertools
import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dsim.engine.commits import CommitDraws
from dsim.engine.engine import Engine
from dsim.engine.journal import REQUEST_COLUMNS, RequestTable, StepRecorder
from dsim.engine.latency import LatencyModel
from dsim.engine.policy import Policy, parse
from dsim.engine.replay import replay
from dsim.engine.request import Request
from dsim.engine.step import StepOutcome, StepPlan
from dsim.live.loop import serve
from dsim.profiler.profile import Profile
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate
from dsim.traces import Trace

from ..worlds import BLOCK_PRESETS, TOY_MODEL, Collector, journal_bytes, table_bytes, toy_profile, toy_trace
from .stub import StubExecutor

# Halves, quarters and so on of a second add up without rounding.
EXACT = LatencyModel(((0.0, 0.125), (16.0, 0.25)), 2.0**-8, host_request=2.0**-6)
TICK = LatencyModel(((0.0, 0.125),), 0.0)
ROUGH = LatencyModel(((0.0, 0.1), (16.0, 0.23)), 0.003, attention=1e-6, host_request=0.007)
SMALL = ",max_batch=4,num_pages=40,page_size=8"


def small(name: str) -> Policy:
    return parse(name + SMALL + ("" if name == "ar" else ",block_length=4"))


class FakeClock:
    """Time that passes in `sleep`, `late` longer than asked, and by `tick` whenever it is read."""

    def __init__(self, begin: float = 0.0, late: float = 0.0, tick: float = 0.0) -> None:
        self.now = begin
        self.late = late
        self.tick = tick
        self.slept: list[float] = []

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        # Time passes, be the sleep shorter than the clock's last digit.
        self.now = max(self.now + seconds + self.late, math.nextafter(self.now, math.inf))


class Live:
    """A run of the live driver, and what it left."""

    def __init__(
        self,
        policy: Policy,
        trace: Trace,
        profile: Profile,
        clock: Any = None,
        sleep: Any = None,
        time_scale: float = 1.0,
        concurrency: int | None = None,
    ) -> None:
        self.policy, self.profile, self.trace = policy, profile, trace
        self.limits = Setting(policy, profile).limits
        self.table = RequestTable(len(trace))
        engine = self.engine(self.table)
        width = policy.block_length * (2 if policy.obs else 1)
        model = Setting(policy, profile).commits
        draws = None
        if model is not None:
            draws = CommitDraws(model, 3, trace.input_length, trace.output_length, width, deltas=profile.focus)
        fake = clock or FakeClock()
        asleep = sleep or fake.sleep
        executor = StubExecutor(profile.latency, draws, time_scale=time_scale, clock=fake, sleep=asleep)
        self.journal = Collector()
        recorder = StepRecorder(self.journal, width)
        requests = (trace.request(i) for i in range(len(trace)))
        self.seconds = serve(
            engine, executor, requests, concurrency=concurrency, recorder=recorder, clock=fake, sleep=asleep
        )
        recorder.flush()

    def engine(self, table: RequestTable) -> Engine:
        return Engine(self.policy, self.limits, table, latency=self.profile.latency)

    def differences(self) -> tuple[list[str], RequestTable]:
        """The journal on a fresh engine."""
        table = RequestTable(len(self.trace))
        steps, lists = self.journal.steps, self.journal.lists
        return list(replay(self.engine(table), 0, self.table.columns, steps, lists)), table

    @property
    def bytes(self) -> dict[str, bytes]:
        return table_bytes(self.table) | journal_bytes(self.journal)


def crowd(n: int = 18, seed: int = 0, grain: float = 0.125) -> Trace:
    """Requests at multiples of `grain` s, some together, some after a pause; one fits no pool."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.choice([0, 1, 5, 40, 200], n, p=[0.2, 0.2, 0.3, 0.2, 0.1])) * grain
    prompts, outputs = rng.integers(1, 60, n), rng.integers(1, 40, n)
    prompts[4], outputs[9] = 1000, 1
    return toy_trace(arrival - arrival[0], prompts, outputs)


def plain_steps(journal: Collector) -> dict[str, npt.NDArray[Any]]:
    return {name: values for name, values in journal.steps.items() if name not in ("start", "latency", "device")}


@pytest.mark.parametrize("name", BLOCK_PRESETS)
def test_a_live_journal_replays_plan_for_plan(name: str) -> None:
    # A sleep that lasts too long is what a device does to a prediction, and the host's own work takes time.
    clock = FakeClock(begin=12_345.678, late=0.0137, tick=0.0007)
    live = Live(small(name), crowd(grain=0.11), toy_profile(TOY_MODEL, ROUGH), clock, clock.sleep)
    found, table = live.differences()
    assert found == []
    assert live.journal.steps["prefill"].sum() > 5
    assert (live.table["status"] == 1).sum() == 1
    # Clock readings are told from latencies, so they may differ in their last digits; nothing else may.
    for column, kind in REQUEST_COLUMNS.items():
        if kind == "float64":
            np.testing.assert_allclose(table[column], live.table[column], rtol=0, atol=1e-9)
        else:
            assert np.array_equal(table[column], live.table[column]), column


EVERY = [*((name, EXACT, None) for name in BLOCK_PRESETS), ("chunk", TICK, None), ("chunk", EXACT, 3)]


@pytest.mark.parametrize(("name", "latency", "concurrency"), EVERY)
def test_on_an_exact_clock_the_live_journal_is_the_twins(
    name: str, latency: LatencyModel, concurrency: int | None
) -> None:
    trace, profile, policy = crowd(), toy_profile(TOY_MODEL, latency), small(name)
    clock = FakeClock(begin=4096.5)
    live = Live(policy, trace, profile, clock, clock.sleep, concurrency=concurrency)
    journal = Collector()
    twin = simulate(trace, Setting(policy, profile), seed=3, append=journal, concurrency=concurrency)
    assert live.bytes == table_bytes(twin.table) | journal_bytes(journal)
    assert live.seconds == twin.end
    # Some requests come while a step runs; under TICK, and in a closed loop, others at the very moment one ends.
    ends = journal.steps["start"] + journal.steps["latency"]
    assert not np.isin(live.table["arrival"], ends).all()
    assert np.isin(live.table["arrival"], ends).any() or (latency is EXACT and concurrency is None)


class Instant:
    """An executor whose every step takes 1 s of a fake clock."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.plans: list[StepPlan] = []

    def step(self, plan: StepPlan) -> StepOutcome:
        self.plans.append(plan)
        self.clock.now += 1.0
        return StepOutcome(1.0, np.ones_like(plan.window))


def serve_ar(requests: Iterable[Request], clock: FakeClock, size: int) -> tuple[RequestTable, Instant, float]:
    profile, policy = toy_profile(), parse("ar,max_batch=2")
    table = RequestTable(size)
    executor = Instant(clock)
    engine = Engine(policy, Setting(policy, profile).limits, table)
    return table, executor, serve(engine, executor, requests, clock=clock, sleep=clock.sleep)


def test_the_loop_sleeps_until_a_request_is_due_and_not_while_it_works() -> None:
    clock = FakeClock(begin=100.0)
    requests = [Request(0, 2.0, 5, 3), Request(1, 3.5, 5, 1), Request(2, 20.0, 5, 1)]
    table, executor, seconds = serve_ar(requests, clock, 3)
    # 2-3 prefill of 0; 3-4 a token; 1 came at 3.5: 4-5 its prefill; 5-6 the last token of 0; idle to 20.
    assert [(plan.now, plan.prefill, plan.requests.tolist()) for plan in executor.plans] == [
        (2.0, True, [0]), (3.0, False, [0]), (4.0, True, [1]), (5.0, False, [0]), (20.0, True, [2]),
    ]  # fmt: skip
    assert clock.slept == [2.0, 14.0]
    assert table["finish"].tolist() == [6.0, 5.0, 21.0]
    assert seconds == 21.0


def test_a_request_that_comes_while_the_clock_oversleeps_is_served_at_once() -> None:
    clock = FakeClock(late=5.0)
    table, executor, _ = serve_ar([Request(0, 1.0, 5, 1), Request(1, 2.0, 5, 1)], clock, 2)
    assert [plan.requests.tolist() for plan in executor.plans] == [[0, 1]]
    # Its clock starts when it arrived, not when it was noticed.
    assert table["arrival"].tolist() == [1.0, 2.0]
    assert table["finish"].tolist() == [7.0, 7.0]


def test_requests_are_taken_one_ahead_and_no_more() -> None:
    # They may come from a generator that waits for someone.
    taken = []

    def requests() -> Iterable[Request]:
        for i in itertools.count():
            if i == 5:
                return
            taken.append((i, clock.now))
            yield Request(i, 10.0 * i, 5, 1)

    clock = FakeClock()
    serve_ar(requests(), clock, 5)
    assert taken == [(0, 0.0), (1, 0.0), (2, 10.0), (3, 20.0), (4, 30.0)]


def test_on_the_real_clock_a_scaled_down_run_keeps_the_twins_plans_and_replays() -> None:
    # All at once, so that no plan depends on how fast this machine is.
    trace = toy_trace([0.0] * 8, [20] * 8, [12] * 8)
    profile, policy = toy_profile(TOY_MODEL, ROUGH), small("optimus")
    begin = time.monotonic()
    live = Live(policy, trace, profile, time.monotonic, time.sleep, time_scale=0.01)
    took = time.monotonic() - begin
    journal = Collector()
    simulate(trace, Setting(policy, profile), seed=3, append=journal)
    assert live.differences()[0] == []
    mine, theirs = plain_steps(live.journal), plain_steps(journal)
    for column in mine:
        assert mine[column].tobytes() == theirs[column].tobytes(), column
    # What it reports is what it took: no less than it slept, and in all no more than it was there.
    steps = live.journal.steps
    assert (steps["latency"] >= 0.01 * journal.steps["latency"]).all()
    assert (np.diff(steps["start"]) >= steps["latency"][:-1]).all()
    assert steps["latency"].sum() <= live.seconds <= took
