"""Overload is called overload, and a busy hour is not: `stable` against queues whose load is known."""

import numpy as np
import pytest

from dsim.engine.journal import REQUEST_COLUMNS, STATUSES
from dsim.report.metrics import MIN_REQUESTS, stable

from .fixtures import Columns

SEEDS = 200


def single_server(
    load: float, seed: int, *, n: int = 2000, service: float = 2.0, burst: int = 0, cv: float = 1.0
) -> Columns:
    """A first-come-first-served queue with constant service and Gamma gaps, after a burst at once (Lindley)."""
    rng = np.random.default_rng([seed, int(load * 1000), n])
    gaps = rng.gamma(cv**-2, service / load * cv**2, n)
    gaps[: burst + 1] = 0.0
    arrival = np.cumsum(gaps)
    wait = np.zeros(n)
    for i in range(1, n):
        wait[i] = max(0.0, wait[i - 1] + service - gaps[i])
    columns = {name: np.zeros(n, dtype) for name, dtype in REQUEST_COLUMNS.items()}
    return columns | {"arrival": arrival, "scheduled": arrival + wait, "finish": arrival + wait + service}


def share_stable(load: float, **how: float) -> float:
    return float(np.mean([stable(single_server(load, seed, **how)) for seed in range(SEEDS)]))  # type: ignore[arg-type]


@pytest.mark.parametrize("load", [0.5, 0.8, 0.9])
def test_a_loaded_queue_is_stable(load: float) -> None:
    assert share_stable(load) > 0.95


@pytest.mark.parametrize("load", [1.1, 1.3, 2.0])
def test_an_overloaded_queue_is_not(load: float) -> None:
    assert share_stable(load) < 0.05


@pytest.mark.parametrize("service", [0.5, 30.0])
def test_the_unit_of_time_does_not_matter(service: float) -> None:
    assert share_stable(0.9, service=service) > 0.95
    assert share_stable(1.1, service=service) < 0.05


def test_a_bursty_start_is_not_overload() -> None:
    assert share_stable(0.7, n=200, burst=60) > 0.99


def test_overload_after_a_burst_is_overload() -> None:
    assert share_stable(1.2, burst=200) < 0.05


def test_bursty_arrivals_at_a_moderate_load_are_not_overload() -> None:
    assert share_stable(0.7, cv=3.0) > 0.95


@pytest.mark.parametrize(("late", "expected"), [(70.0, True), (130.0, False)])
def test_a_queue_past_its_peak_is_recovering(late: float, expected: bool) -> None:
    wait = np.repeat([0.0, 100.0, 60.0, late], 50)
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


def test_a_closed_loop_cannot_outrun_its_server() -> None:
    columns = single_server(2.0, 0)
    assert not stable(columns)
    assert stable(columns, closed_loop=True)


def test_a_batch_that_arrives_at_once_is_work_not_load() -> None:
    columns = single_server(1.0, 0, n=400, burst=400)
    assert (columns["arrival"] == 0).all()
    assert stable(columns)


def test_the_order_of_rows_does_not_matter() -> None:
    columns = single_server(1.3, 0, n=200)
    shuffled = np.random.default_rng(0).permutation(200)
    assert not stable(columns)
    assert not stable({name: column[shuffled] for name, column in columns.items()})


def test_a_handful_of_requests_tells_nothing() -> None:
    assert stable(single_server(3.0, 0, n=MIN_REQUESTS - 1))
    assert not stable(single_server(3.0, 0, n=10 * MIN_REQUESTS))
