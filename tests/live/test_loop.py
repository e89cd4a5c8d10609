"""The live driver with a stub in the device's place: its journal replays, and on an exact clock it is the twin's."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import REQUEST_COLUMNS, RequestTable, StepRecorder
from dsim.engine.latency import LatencyModel
from dsim.engine.replay import replay
from dsim.engine.request import Request
from dsim.engine.spec import Policy, parse
from dsim.engine.step import StepOutcome, StepPlan
from dsim.live.device_loop import serve
from dsim.profiler.profile import Profile
from dsim.sim.setting import Setting
from dsim.sim.step_model import StepModel
from dsim.sim.twin import simulate
from dsim.traces import Trace

from ..worlds import BLOCK_PRESETS, TOY_MODEL, Collector, journal_bytes, table_bytes, toy_profile, toy_trace

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


class Stub:
    """Stands in for a device: it sleeps for the predicted time, and the latency it reports is the time it took."""

    def __init__(self, model: StepModel, clock: FakeClock) -> None:
        self.model, self.clock = model, clock

    def step(self, plan: StepPlan) -> StepOutcome:
        begin, outcome = self.clock(), self.model.step(plan)
        self.clock.sleep(outcome.latency)
        return replace(outcome, latency=self.clock() - begin)


class Live:
    """A run of the live driver, and what it left."""

    def __init__(
        self, policy: Policy, trace: Trace, profile: Profile, clock: FakeClock, concurrency: int | None = None
    ) -> None:
        self.setting, self.table, self.journal = Setting(policy, profile), RequestTable(len(trace)), Collector()
        recorder = StepRecorder(self.journal, policy.width)
        self.seconds = serve(
            self.setting.engine(self.table), Stub(self.setting.step_model(self.setting.draws(3, trace)), clock),
            (trace.request(i) for i in range(len(trace))), concurrency=concurrency, recorder=recorder, clock=clock,
            sleep=clock.sleep,
        )  # fmt: skip
        recorder.flush()


def crowd(grain: float = 0.125) -> Trace:
    """Requests at multiples of `grain` s, some together, some after a pause; one fits no pool."""
    rng, n = np.random.default_rng(0), 18
    arrival = np.cumsum(rng.choice([0, 1, 5, 40, 200], n, p=[0.2, 0.2, 0.3, 0.2, 0.1])) * grain
    prompts, outputs = rng.integers(1, 60, n), rng.integers(1, 40, n)
    prompts[4], outputs[9] = 1000, 1
    return toy_trace(arrival - arrival[0], prompts, outputs)


@pytest.mark.parametrize("name", BLOCK_PRESETS)
def test_a_live_journal_replays_plan_for_plan(name: str) -> None:
    # A sleep that lasts too long is what a device does to a prediction, and the host's own work takes time.
    clock = FakeClock(begin=12_345.678, late=0.0137, tick=0.0007)
    live = Live(small(name), crowd(grain=0.11), toy_profile(TOY_MODEL, ROUGH), clock)
    table, steps = RequestTable(len(live.table["request"])), live.journal.steps
    engine = live.setting.engine(table)
    assert list(replay(engine, 0, live.table.columns, steps, live.journal.lists)) == []
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
    live = Live(policy, trace, profile, clock, concurrency)
    journal = Collector()
    twin = simulate(trace, Setting(policy, profile), seed=3, append=journal, concurrency=concurrency)
    assert table_bytes(live.table) == table_bytes(twin.table)
    assert journal_bytes(live.journal) == journal_bytes(journal)
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


LOOPED = parse("lmdeploy-bd32,block_length=4,page_size=8,max_batch=6,max_prefill_tokens=16,threshold=0.02,num_loops=2")


def one_a_step(plan: StepPlan) -> StepOutcome:
    committed = np.zeros_like(plan.window)
    for row, (window, status) in enumerate(zip(plan.window, plan.status, strict=True)):
        masks = np.flatnonzero(window & (status == 0))
        committed[row, masks[:1]] = True
    return StepOutcome(1.0, committed)


def test_the_account_of_a_step_is_taken_while_the_next_one_runs_and_of_the_last_in_the_end() -> None:
    engine = Engine(LOOPED, Limits(60, 64, 6), RequestTable(2))
    told: list[str] = []
    meanwhile: list[Any] = []

    class Device:
        def step(self, plan: StepPlan) -> StepOutcome:
            told.append("launched")
            for work in meanwhile:
                work()
            told.append("over")
            return one_a_step(plan)

    serve(
        engine, Device(), [Request(0, 0.0, 5, 2), Request(1, 0.0, 5, 1)], meanwhile=meanwhile,
        progress=lambda done, now: told.append("account"),
    )  # fmt: skip
    steps = engine.totals.num_decode_steps + engine.totals.num_prefill_steps
    assert steps > 2
    assert told == ["launched", "over", *["launched", "account", "over"] * (steps - 1), "account"]
    assert meanwhile == []
