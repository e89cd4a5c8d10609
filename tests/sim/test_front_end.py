"""The front end as a queue: closed forms, each way of arriving, and its fit to times drawn with known ones."""

from dataclasses import replace

import numpy as np
import pytest

from dsim.engine.policy import parse
from dsim.profiler.frontend import FrontEnd, Queue, fit_front_end
from dsim.profiler.profile import load
from dsim.sim.setting import Setting
from dsim.sim.twin import Result, simulate
from dsim.traces import Trace

PROFILE = load("h100-qwen3-8b-ar")


def run(trace: Trace, fixed: float, service: float, **how: object) -> Result:
    profile = replace(PROFILE, frontend=fixed, frontend_service=service)
    return simulate(trace, Setting(parse("ar"), profile), **how)


def poisson(num: int, rate: float, seed: int = 0) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num))


def test_its_mean_delay_is_that_of_an_m_d_1_queue() -> None:
    rate, service, fixed = 8.0, 0.05, 0.013
    arrival = poisson(400_000, rate)
    load = rate * service
    delay = (FrontEnd(fixed, service).reach(arrival) - arrival).mean()
    assert delay == pytest.approx(fixed + service + load * service / (2 * (1 - load)), rel=0.01)


def test_a_run_asks_it_request_by_request_for_the_same_times() -> None:
    arrival, front = poisson(500, 20.0), FrontEnd(0.01, 0.04)
    queue = Queue(front)
    assert [queue.reach(t) for t in arrival.tolist()] == pytest.approx(front.reach(arrival).tolist(), abs=1e-9)


def test_requests_of_an_open_loop_reach_the_engine_one_by_one() -> None:
    trace = Trace("four", np.array([0.0, 0.0, 0.0, 5.0]), np.full(4, 100), np.full(4, 2))
    table = run(trace, 0.02, 0.5).table
    assert table["scheduled"] - table["arrival"] == pytest.approx([0.52, 1.02, 1.52, 0.52])


def test_workers_of_a_closed_loop_queue_before_the_engine() -> None:
    trace = Trace("four", np.zeros(4), np.full(4, 100), np.full(4, 2))
    table = run(trace, 0.02, 0.5, concurrency=2).table
    assert table["scheduled"][:2] == pytest.approx([0.52, 1.02])
    # The first ends while the second is served: it sends the third, which waits for the second.
    assert table["scheduled"][2] == pytest.approx(1.52)
    assert table["arrival"][2] == table["finish"][0]


def test_a_turn_of_a_session_joins_the_queue_when_the_turn_before_has_ended() -> None:
    extras = {"session_id": ["a", "a", "b"]}
    trace = Trace("three", np.array([0.0, 0.1, 0.2]), np.full(3, 100), np.full(3, 2), extras=extras)
    table = run(trace, 0.0, 0.5, sessions=True).table
    assert table["arrival"][1] == table["finish"][0]
    # b came before that turn was sent, so it is before it in the queue.
    assert table["scheduled"] == pytest.approx([0.5, 1.5, 1.0], abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("fixed", "service"), [(0.006, 0.02), (0.0, 0.06), (0.03, 0.008)])
def test_a_fit_recovers_what_drew_the_times(fixed: float, service: float, seed: int) -> None:
    sent, rng = poisson(600, 8.0, seed), np.random.default_rng(100 + seed)
    outside = FrontEnd(fixed, service).reach(sent) - sent + rng.laplace(0.0, 5e-4, 600)
    found = fit_front_end(sent, outside)
    assert found.service == pytest.approx(service, abs=3e-4 + 0.01 * service)
    assert found.fixed + found.service == pytest.approx(fixed + service, abs=3e-4 + 0.01 * service)


@pytest.mark.parametrize("num", [10, 600])
def test_times_that_do_not_grow_with_the_load_are_a_constant(num: int) -> None:
    sent, rng = poisson(num, 8.0), np.random.default_rng(1)
    outside = 0.02 + rng.laplace(0.0, 1e-3, num)
    assert fit_front_end(sent, outside) == FrontEnd(float(np.median(outside)))
