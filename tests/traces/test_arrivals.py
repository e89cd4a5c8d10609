"""Arrival processes against theory: means, CVs, Fano factors, and the same bytes for the same seed.

Tolerances are four standard errors of the statistic at the sample's size, seeds are fixed.
"""

import math
import re

import numpy as np
import pytest
from scipy.stats import kstest

from dsim.engine.errors import TraceError
from dsim.traces import ARRIVALS, Trace, fit, load, synth
from dsim.traces.arrivals import renewal, resolve_cv, weibull_shape
from dsim.traces.burstgpt import BurstGPTLike, burstgpt_like, fit_burstgpt_like
from dsim.traces.stats import fano, gap_cv

N = 200_000


@pytest.mark.parametrize(
    ("arrival", "cv", "law", "kurtosis"),
    # Kurtosis sets how far an empirical CV strays; for a Gamma it is 3 + 6 cv^2, for these Weibulls numeric.
    [
        ("poisson", 1.0, "expon", 9.0), ("gamma", 0.5, "gamma", 4.5), ("gamma", 2.0, "gamma", 27.0),
        ("weibull", 0.5, "weibull_min", 3.1), ("weibull", 2.0, "weibull_min", 90.0),
    ],
)  # fmt: skip
def test_gaps_have_the_distribution_of_the_process(arrival: str, cv: float, law: str, kurtosis: float) -> None:
    rate, shape = 5.0, weibull_shape(cv)
    arguments = {
        "expon": (0, 1 / rate), "gamma": (cv**-2, 0, cv**2 / rate),
        "weibull_min": (shape, 0, 1 / rate / math.gamma(1 + 1 / shape)),
    }  # fmt: skip
    gaps = np.diff(renewal(arrival, N + 1, rate, cv, seed=3))
    assert gaps.mean() == pytest.approx(1 / rate, rel=4 * cv / math.sqrt(N))
    error = math.sqrt((kurtosis - 1) / 4 / N + cv**2 / N)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=4 * error)
    # The 0.1 % point of the distance at this size.
    assert kstest(gaps[:20_000], law, args=arguments[law]).statistic < 1.95 / math.sqrt(20_000)


def test_weibull_shapes_give_their_cv() -> None:
    for cv in (0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 30.0):
        shape = weibull_shape(cv)
        assert math.expm1(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)) == pytest.approx(cv**2, rel=1e-6)
    assert weibull_shape(1.0) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("arrival", ARRIVALS[1:])
def test_the_same_seed_gives_the_same_bytes_and_a_longer_run_begins_with_the_shorter(arrival: str) -> None:
    def draw(seed: int, num_requests: int = 500) -> Trace:
        return synth(arrival, 5.0, num_requests=num_requests, seed=seed, lengths="lmsys")

    one, same, other, longer = draw(7), draw(7), draw(8), draw(7, 1000)
    for column in ("arrival", "input_length", "output_length"):
        assert getattr(one, column).tobytes() == getattr(same, column).tobytes()
        if (arrival, column) != ("constant", "arrival"):
            assert getattr(one, column).tobytes() != getattr(other, column).tobytes()
        if (arrival, column) != ("burstgpt-like", "arrival"):
            assert getattr(one, column).tolist() == getattr(longer, column)[:500].tolist()


def test_draws_do_not_change_between_versions_and_scale_with_the_rate() -> None:
    assert synth("poisson", 1.0, num_requests=4).arrival.round(6).tolist() == [0.0, 1.482911, 2.383645, 2.727726]
    gamma = synth("gamma", 1.0, cv=2.0, num_requests=4).arrival
    assert gamma.round(6).tolist() == [0.0, 1.213515, 1.573666, 1.593136]
    assert renewal("gamma", 4, 4.0, 2.0, seed=0) == pytest.approx(gamma / 4)
    assert renewal("constant", 4, 2.0, 0.0, seed=0).tolist() == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("arrival", "cv", "burstiness", "found"),
    [
        ("gamma", None, 0.25, 2.0), ("gamma", None, 4.0, 0.5), ("gamma", 2.0, 0.25, 2.0), ("gamma", None, None, 1.0),
        ("poisson", 1.0, 1.0, 1.0), ("constant", 0.0, None, 0.0),
    ],
)  # fmt: skip
def test_burstiness_is_the_cv_in_vllms_sense(
    arrival: str, cv: float | None, burstiness: float | None, found: float
) -> None:
    assert resolve_cv(arrival, cv, burstiness) == found


@pytest.mark.parametrize(
    ("arrival", "cv", "burstiness", "complaint"),
    [
        ("gamma", 2.0, 0.5, "cv is 2.0 but burstiness 0.5 means 1.41421, expected one of them"),
        ("gamma", 0.0, None, "cv is 0, expected 0.001 to 30 for gamma arrivals"),
        ("poisson", 2.0, None, "cv is 2, expected 1 with poisson arrivals"),
        ("constant", None, 1.0, "cv is 1, expected 0 with constant arrivals"),
        ("burstgpt-like", 2.0, None, "cv is 2, expected none with burstgpt-like arrivals"),
    ],
)
def test_a_cv_that_cannot_be_is_refused(
    arrival: str, cv: float | None, burstiness: float | None, complaint: str
) -> None:
    with pytest.raises(TraceError, match=re.escape(complaint)):
        resolve_cv(arrival, cv, burstiness)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_no_rate_is_refused(rate: float) -> None:
    for arrival in ARRIVALS[1:]:
        with pytest.raises(TraceError, match=re.escape(f"rate is {rate} req/s, expected above 0 and finite")):
            synth(arrival, rate, num_requests=10)


def test_the_fano_factor_is_one_for_poisson_and_cv_squared_at_long_windows() -> None:
    poisson = renewal("poisson", N, 5.0, 1.0, seed=2)
    for window in (1.0, 10.0, 60.0):
        num_windows = poisson[-1] / window
        assert fano(poisson, window) == pytest.approx(1.0, abs=4 * math.sqrt(2 / num_windows))
    bursty = renewal("gamma", N, 5.0, 2.0, seed=2)
    assert fano(bursty, 60.0) == pytest.approx(4.0, rel=4 * math.sqrt(2 / (bursty[-1] / 60)))
    assert fano(np.arange(100) * 0.25, 1.0) == 0.0
    assert fano(np.array([0.0, 1.0]), 1.0) is None
    assert gap_cv(np.array([0.0, 1.0, 4.0])) == 0.5
    # Worked by hand: windows [0, 1) and [1, 2) hold 3 and 1; what follows the last whole window does not count.
    assert fano(np.array([0.0, 0.1, 0.2, 1.5, 2.5]), 1.0) == pytest.approx(1.0 / 2.0)


def test_burstgpt_like_arrivals_keep_their_rate() -> None:
    for rate in (0.5, 5.0, 50.0):
        arrival = burstgpt_like(100_000, rate, seed=4)
        assert len(arrival) == 100_000
        assert arrival[0] == 0
        assert (np.diff(arrival) >= 0).all()
        assert (len(arrival) - 1) / arrival[-1] == pytest.approx(rate, rel=0.03)


def test_burstgpt_like_without_bursts_or_swing_is_poisson() -> None:
    plain = BurstGPTLike(day_swing=0, rate_cv=0, bursty_share=0)
    gaps = np.diff(burstgpt_like(N, 5.0, seed=1, parameters=plain))
    assert kstest(gaps, "expon", args=(0, gaps.mean())).statistic < 1.95 / math.sqrt(N)


def test_burstgpt_like_windows_start_in_equilibrium() -> None:
    # Rare and bursty arrivals: a renewal process that started afresh would bring (cv^2 - 1) / 2 more a window.
    rare = BurstGPTLike(num_streams=1, day_swing=0, rate_cv=0, bursty_share=1, bursty_low=0.2, bursty_high=0.2)
    arrival = burstgpt_like(50_000, 0.1, seed=2, parameters=rare)
    counts = np.bincount((arrival / 60).astype(int))
    assert counts.mean() == pytest.approx(6.0, abs=4 * counts.std() / math.sqrt(len(counts)))
    assert counts.std() / math.sqrt(len(counts)) < 0.1  # a bias of 2 would show


def test_default_burstgpt_like_traffic_is_as_the_docs_say() -> None:
    arrival = synth("burstgpt-like", 5.0, num_requests=432_000, seed=1).arrival
    assert gap_cv(arrival) == pytest.approx(1.66, abs=0.01)
    assert [fano(arrival, w) for w in (1.0, 10.0, 60.0)] == pytest.approx([3.4, 18, 98], rel=0.02)


def test_burstgpt_like_parameters_are_found_again() -> None:
    truth = BurstGPTLike(
        num_streams=1, calm_shape=1.2, bursty_low=0.3, bursty_high=0.4, bursty_share=0.3, rate_cv=0.4, day_swing=0.5,
        peak_hour=6, start_hour=0,
    )  # fmt: skip
    found = fit_burstgpt_like(synth("burstgpt-like", 5.0, num_requests=5 * 86_400 * 2, parameters=truth))
    assert found.num_streams == 1
    assert found.calm_shape == pytest.approx(1.2, rel=0.02)
    assert found.bursty_share == pytest.approx(0.3, abs=0.03)
    assert found.rate_cv == pytest.approx(0.4, abs=0.02)
    assert found.day_swing == pytest.approx(0.5, abs=0.05)
    assert found.peak_hour == pytest.approx(6, abs=0.2)
    assert 0.28 < found.bursty_low < found.bursty_high < 0.43


def test_a_short_trace_is_no_pattern_to_fit() -> None:
    with pytest.raises(TraceError, match="has 0 windows of 60 s with 20 gaps, expected at least 4"):
        fit_burstgpt_like(synth("poisson", 5.0, num_requests=100))
    with pytest.raises(TraceError, match="burstgpt-like bursty_share is 2, expected 0 to 1"):
        BurstGPTLike(bursty_share=2)


def test_a_gamma_fit_finds_what_was_drawn_and_doubts_what_was_not() -> None:
    drawn = fit(synth("gamma", 5.0, cv=2.0, num_requests=50_000, seed=6))
    assert drawn.shape == pytest.approx(0.25, rel=0.02)
    assert drawn.cv == pytest.approx(2.0, rel=0.01)
    assert drawn.rate == pytest.approx(5.0, rel=4 * 2 / math.sqrt(50_000))
    assert drawn.believable
    azure = fit(load("azure-conv"))
    assert azure.trace_cv == pytest.approx(1.09, abs=0.005)
    assert azure.believable
    # Windows of traffic that vary in rate: a Gamma may fit the gaps, but the Fano factor says otherwise.
    assert azure.fano["60"] is not None
    assert azure.fano["60"] > 10 * azure.cv**2
    batched = fit(load("mooncake-conv"))
    assert batched.zero_gaps == pytest.approx(0.895, abs=0.001)
    assert not batched.believable
    with pytest.raises(TraceError, match="has 4 gaps above 0 to fit, expected at least 10"):
        fit(synth("poisson", 1.0, num_requests=5))
