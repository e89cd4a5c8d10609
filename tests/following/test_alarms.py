"""Alarms: four causes, told apart, and seldom false."""

import math

import numpy as np
import pytest

from dsim.following.alarms import K_LEAST, OVERSHOOT, WINDOWS_A_MONTH, Alarm, Alarms, learnt_band, threshold
from dsim.following.residuals import CAUSE_OF, PRICES, RULE, YIELD

from ..checks import cases

NOISE = dict.fromkeys(CAUSE_OF, 0.02)


def residuals(rng: np.random.Generator, **shift: float) -> dict[str, tuple[float, float]]:
    error = math.sqrt(3 / 4)
    return {name: (shift.get(name, 0.0) + sd * rng.standard_normal(), sd * error) for name, sd in NOISE.items()}


def judged(alarms: Alarms, now: int, found: dict[str, tuple[float, float]]) -> list[Alarm]:
    """As a follower does: while prices or yield are off, the rule's charts wait."""
    return alarms.add(float(now), found, {}, {RULE} if alarms.explained(found) else ())


def test_the_threshold_gives_siegmunds_run_length() -> None:
    for k, windows in ((0.5, 1e4), (1.0, 1e5)):
        b = threshold(k, windows) + OVERSHOOT
        assert (math.exp(2 * k * b) - 2 * k * b - 1) / (2 * k * k) == pytest.approx(windows, rel=1e-3)


def test_the_run_length_is_what_simulated_charts_have() -> None:
    rng = np.random.default_rng(1)
    h, sums, lengths = threshold(K_LEAST, 500), np.zeros(2000), np.full(2000, np.inf)
    for step in range(1, 6000):
        sums = np.maximum(0, sums + rng.standard_normal(2000) - K_LEAST)
        lengths = np.where((sums > h) & np.isinf(lengths), step, lengths)
    assert np.isfinite(lengths).mean() > 0.999
    assert lengths[np.isfinite(lengths)].mean() == pytest.approx(500, rel=0.1)


@pytest.mark.slow
def test_a_server_that_does_not_change_raises_at_most_one_alarm_a_month() -> None:
    rng, alarms, raised = np.random.default_rng(2), Alarms(), 0
    for window in range(WINDOWS_A_MONTH):
        raised += len(alarms.add(float(window), residuals(rng), {}))
        alarms.settle({})
    assert raised <= 1


@pytest.mark.slow
def test_traffic_that_few_windows_stand_for_is_not_known_exactly() -> None:
    a_window = 300
    off = 3 / math.sqrt(6 * a_window)  # the mean of six windows, three standard errors off for good
    raised = {}
    for band in (0.0, learnt_band(6 * a_window)):
        rng, alarms, raised[band] = np.random.default_rng(5), Alarms(), 0
        for window in range(WINDOWS_A_MONTH):
            rate = math.log(rng.poisson(a_window) / a_window) + off
            raised[band] += len(alarms.add(float(window), {"rate": (rate, 1 / math.sqrt(a_window))}, {"rate": band}))
            if alarms.open:
                alarms.close()
    assert raised[learnt_band(6 * a_window)] <= 1 < raised[0.0]


@cases(
    "shift cause",
    ({"step_time": 0.1, "ttft": 0.5, "queue": 0.8, "running": 0.3}, PRICES),
    ({"steps_per_token": -0.1, "e2el": -0.3, "running": -0.3}, YIELD),
    ({"ttft": 0.5, "queue": 0.8}, RULE),
    ({"rate": 0.5}, "traffic"),
)
def test_a_change_is_named_by_its_cause_and_nothing_else(shift: dict[str, float], cause: str) -> None:
    rng, alarms = np.random.default_rng(3), Alarms()
    for window in range(40):
        assert not judged(alarms, window, residuals(rng))
    raised = [alarm for window in range(40, 60) for alarm in judged(alarms, window, residuals(rng, **shift))]
    assert [alarm.cause for alarm in raised] == [cause]
    assert raised[0].since <= 44
    assert raised[0].shift == pytest.approx(shift[raised[0].quantity], abs=0.05)


def test_no_single_window_raises_an_alarm_and_one_that_is_over_ends() -> None:
    rng, alarms = np.random.default_rng(4), Alarms()
    for window in range(40):
        alarms.add(float(window), residuals(rng, **({"step_time": 5.0} if window == 20 else {})), {})
    assert not alarms.open
    for window in range(40, 50):
        alarms.add(float(window), residuals(rng, step_time=0.2), {})
    assert {*alarms.open} == {PRICES}
    settled = []
    for window in range(50, 80):
        alarms.add(float(window), residuals(rng), {})
        settled += alarms.settle({})
    assert settled == [PRICES]


def test_prices_wait_while_the_twin_cannot_predict_them() -> None:
    rng, alarms = np.random.default_rng(5), Alarms()
    for window in range(40):
        alarms.add(float(window), residuals(rng, step_time=0.1), {}, {PRICES})
    assert not alarms.open
