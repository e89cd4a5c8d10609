"""Arrival processes against theory: means, CVs, and the same bytes for the same seed.

Tolerances are four standard errors of the statistic at the sample's size, seeds are fixed.
"""

import math

import numpy as np
import pytest
from scipy.stats import kstest

from dsim.engine.errors import TraceError
from dsim.traces import ARRIVALS, Trace, synth
from dsim.traces.arrivals import process_of, renewal
from dsim.traces.stats import gap_cv

from ..checks import cases, refused

N = 200_000


@cases(
    "arrival cv law kurtosis",
    # Kurtosis sets how far an empirical CV strays; for a Gamma it is 3 + 6 cv^2.
    ("poisson", 1.0, "expon", 9.0),
    ("gamma", 0.5, "gamma", 4.5),
    ("gamma", 2.0, "gamma", 27.0),
)
def test_gaps_have_the_distribution_of_the_process(arrival: str, cv: float, law: str, kurtosis: float) -> None:
    rate = 5.0
    arguments = {"expon": (0, 1 / rate), "gamma": (cv**-2, 0, cv**2 / rate)}
    gaps = np.diff(renewal(arrival, N + 1, rate, cv, seed=3))
    assert gaps.mean() == pytest.approx(1 / rate, rel=4 * cv / math.sqrt(N))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=4 * math.sqrt((kurtosis - 1) / 4 / N + cv**2 / N))
    # The 0.1 % point of the distance at this size.
    assert kstest(gaps[:20_000], law, args=arguments[law]).statistic < 1.95 / math.sqrt(20_000)


@cases("arrival", *ARRIVALS[1:])
def test_the_same_seed_gives_the_same_bytes_and_a_longer_run_begins_with_the_shorter(arrival: str) -> None:
    def draw(seed: int, num_requests: int = 500) -> Trace:
        return synth(arrival, 5.0, num_requests=num_requests, seed=seed, lengths="lmsys")

    one, same, other, longer = draw(7), draw(7), draw(8), draw(7, 1000)
    for column in ("arrival", "input_length", "output_length"):
        assert getattr(one, column).tobytes() == getattr(same, column).tobytes()
        if (arrival, column) != ("constant", "arrival"):
            assert getattr(one, column).tobytes() != getattr(other, column).tobytes()
        assert getattr(one, column).tolist() == getattr(longer, column)[:500].tolist()


def test_draws_do_not_change_between_versions_and_scale_with_the_rate() -> None:
    assert synth("poisson", 1.0, num_requests=4).arrival.round(6).tolist() == [0.0, 1.482911, 2.383645, 2.727726]
    gamma = synth("gamma,cv=2", 1.0, num_requests=4).arrival
    assert gamma.round(6).tolist() == [0.0, 1.213515, 1.573666, 1.593136]
    assert renewal("gamma", 4, 4.0, 2.0, seed=0) == pytest.approx(gamma / 4)
    assert renewal("constant", 4, 2.0, 0.0, seed=0).tolist() == [0.0, 0.5, 1.0, 1.5]


@cases(
    "arrival cv complaint",
    ("gamma", -1.0, "cv is -1.0, expected 0.001 to 30"),
    ("gamma", 0.0, "cv is 0.0, expected 0.001 to 30"),
    ("poisson", 2.0, "cv is 2.0, expected none with poisson arrivals: gamma has any CV"),
)
def test_a_cv_that_cannot_be_is_refused(arrival: str, cv: float, complaint: str) -> None:
    with refused(kind=TraceError, says=complaint):
        process_of(f"{arrival},cv={cv}")


@cases("rate", 0.0, -1.0, float("nan"), float("inf"))
def test_a_rate_that_is_no_rate_is_refused(rate: float) -> None:
    for arrival in ARRIVALS[1:]:
        with refused(kind=TraceError, says=f"rate is {rate} req/s, expected above 0 and finite"):
            synth(arrival, rate, num_requests=10)


def test_the_cv_of_gaps() -> None:
    assert gap_cv(np.array([0.0, 1.0, 4.0])) == 0.5
    assert gap_cv(np.arange(100) * 0.25) == 0.0
    assert gap_cv(np.array([0.0, 1.0])) is None
