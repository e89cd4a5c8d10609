"""Overload is called overload, and a busy hour is not: `stable` against queues whose load is known."""

import numpy as np
import pytest

from dsim.engine.journal import REQUEST_COLUMNS, STATUSES
from dsim.results.metrics import MIN_REQUESTS, stable

from ..checks import cases
from ..report.fixtures import Columns

SEEDS = 200


def single_server(
    load: float, seed: int, *, n: int = 2000, service: float = 2.0, burst: int = 0, cv: float = 1.0,
    exponential: bool = False,
) -> Columns:  # fmt: skip
    """A first-come-first-served queue with constant or exponential service and Gamma gaps, after a burst (Lindley)."""
    rng = np.random.default_rng([seed, int(load * 1000), n])
    gaps = rng.gamma(cv**-2, service / load * cv**2, n)
    gaps[: burst + 1] = 0.0
    services = rng.exponential(service, n) if exponential else np.full(n, service)
    arrival = np.cumsum(gaps)
    # Lindley's recursion, solved: the wait is how far the sum of services less gaps stands above its least.
    walk = np.concatenate([[0.0], np.cumsum(services[:-1] - gaps[1:])])
    wait = walk - np.minimum.accumulate(walk)
    columns = {name: np.zeros(n, dtype) for name, dtype in REQUEST_COLUMNS.items()}
    return columns | {"arrival": arrival, "scheduled": arrival + wait, "finish": arrival + wait + services}


def ended_at_the_last_arrival(columns: Columns) -> Columns:
    """The same with `--no-drain`: who was in service or waiting then stays unfinished."""
    end = columns["arrival"][-1]
    over = columns["finish"] <= end
    return columns | {
        "scheduled": np.where(columns["scheduled"] <= end, columns["scheduled"], np.nan),
        "finish": np.where(over, columns["finish"], np.nan),
        "status": np.where(over, STATUSES.index("completed"), STATUSES.index("unfinished")),
    }


def share_stable(load: float, **how: float) -> float:
    return float(np.mean([stable(single_server(load, seed, **how)) for seed in range(SEEDS)]))  # type: ignore[arg-type]


BURSTY_START = {"n": 200, "burst": 60}


@cases(
    "load how",
    *((load, {}) for load in (0.5, 0.8, 0.9)), *((0.9, {"service": s}) for s in (0.5, 30.0)),
    (0.7, BURSTY_START), (0.7, {"cv": 3.0}),
)  # fmt: skip
def test_a_loaded_queue_is_stable_whatever_its_unit_of_time_and_its_bursts(load: float, how: dict[str, float]) -> None:
    assert share_stable(load, **how) > (0.99 if how is BURSTY_START else 0.95)


@cases(
    "load how least",
    *((load, {}, 0.95) for load in (1.1, 1.3, 2.0)), *((1.1, {"service": s}, 0.95) for s in (0.5, 30.0)),
    (1.2, {"burst": 200}, 0.95), *((1.3, {"n": 400, "exponential": e}, 0.9) for e in (False, True)),
    *((2.0, {"n": 400, "exponential": e}, 1.0) for e in (False, True)),
)  # fmt: skip
def test_an_overloaded_queue_is_not_in_a_short_run_either(load: float, how: dict[str, float], least: float) -> None:
    assert 1 - share_stable(load, **how) >= least


# Alarms in 2,000 runs of 400 requests at a load of 0.9: fewer than 1 in 100.
@pytest.mark.parametrize(
    "queue",
    [{}, {"exponential": True}, {"cv": 2.0}, {"cv": 3.0}, {"cv": 0.5}],
    ids=["M/D/1", "M/M/1", "bursts of cv 2", "bursts of cv 3", "regular gaps"],
)
def test_a_short_run_near_its_capacity_raises_no_false_alarm(queue: dict[str, float]) -> None:
    alarms = sum(not stable(single_server(0.9, seed, n=400, **queue)) for seed in range(2000))  # type: ignore[arg-type]
    assert alarms < 20


@cases("load", 0.1, 0.3, 0.5, 0.7)
@cases("exponential", False, True)
def test_a_calm_run_that_ends_with_its_last_arrival_is_stable(load: float, exponential: bool) -> None:
    runs = [ended_at_the_last_arrival(single_server(load, seed, n=400, exponential=exponential)) for seed in range(500)]
    assert any((run["status"] == STATUSES.index("unfinished")).any() for run in runs)
    assert all(stable(run) for run in runs)


@cases("load", 1.3, 2.0, 5.0)
def test_overload_is_seen_where_the_run_ends_with_its_last_arrival(load: float) -> None:
    for exponential in (False, True):
        runs = [ended_at_the_last_arrival(single_server(load, seed, exponential=exponential)) for seed in range(SEEDS)]
        assert sum(stable(run) for run in runs) < 0.01 * SEEDS


@cases("late expected", (70.0, True), (190.0, False))
def test_a_queue_past_its_peak_is_recovering(late: float, expected: bool) -> None:
    wait = np.interp(np.arange(200.0), [0.0, 75.0, 120.0, 200.0], [0.0, 100.0, 60.0, late])
    columns = single_server(0.5, 0, n=200)
    columns["arrival"] = np.arange(200.0)
    columns["scheduled"] = columns["arrival"] + wait
    columns["finish"] = columns["scheduled"] + 2.0
    assert stable(columns) is expected


def test_an_unfinished_request_is_overload_and_a_rejected_one_is_not() -> None:
    columns = single_server(0.5, 0, n=100)
    assert stable(columns)
    for status, expected in (("rejected", True), ("unfinished", False)):
        columns["status"][50] = STATUSES.index(status)
        columns["scheduled"][50] = columns["finish"][50] = np.nan
        assert stable(columns) is expected
        assert stable(columns, closed_loop=True) is expected


def test_a_batch_that_arrives_at_once_is_work_not_load() -> None:
    columns = single_server(1.0, 0, n=400, burst=400)
    assert (columns["arrival"] == 0).all()
    assert stable(columns)


def test_the_order_of_rows_does_not_matter() -> None:
    columns = single_server(1.3, 0, n=200)
    shuffled = np.random.default_rng(0).permutation(200)
    assert not stable(columns)
    assert stable(columns, closed_loop=True)  # its queue cannot grow
    assert not stable({name: column[shuffled] for name, column in columns.items()})


def test_a_handful_of_requests_tells_nothing() -> None:
    assert stable(single_server(3.0, 0, n=MIN_REQUESTS - 1))
    assert not stable(single_server(3.0, 0, n=10 * MIN_REQUESTS))
