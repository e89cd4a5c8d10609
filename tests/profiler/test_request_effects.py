"""How requests differ: logs drawn from a known distribution give it back, and published pairs and classes are met."""

from dataclasses import replace

import numpy as np
import pytest

from dsim.engine.commits import CommitDraws, CommitModel
from dsim.profiler.fit_commits import fit_commits
from dsim.profiler.request_effects import climbed, normal, scaled
from dsim.profiler.yields import draw

from .test_fit_commits import whole_blocks

PLAIN = CommitModel("known", 16, 0.9, None, tuple(0.5 * np.exp(-np.arange(16) / 8.0)), 0.35, 0.2, 0.5)
# Two kinds of requests, code and prose say: a third pass by 1.6 more in log-odds than the others.
TWO_KINDS = replace(PLAIN, request_quantiles=(-0.8,) * 40 + (0.8,) * 20)


def test_a_request_is_drawn_from_the_quantiles() -> None:
    none = np.zeros(6000, np.int64)
    factor = CommitDraws(TWO_KINDS, 1, none, none, 16).arrays.requests["factor"]
    effects = np.log(factor)
    assert set(np.round(np.quantile(effects, [0.05, 0.5, 0.6, 0.72, 0.95]), 6)) == {-0.8, 0.8}
    assert np.mean(effects > 0) == pytest.approx(1 / 3, abs=0.02)
    again = CommitDraws(replace(PLAIN, request_spread=0.0), 1, none, none, 16).arrays.requests["factor"]
    assert (again == 1.0).all()


@pytest.mark.slow
def test_two_kinds_of_requests_are_told_apart_in_their_log() -> None:
    log = draw(TWO_KINDS, whole_blocks(16, 250, 6), seed=3)
    found, fit = fit_commits(log, workload="known", threshold=0.9)
    assert len(found.request_quantiles) == 64
    effects = np.array(found.request_quantiles)
    # Moved with the common log-odds; how far apart the kinds are, and how many are of each, does not move.
    low, high = np.quantile(effects, [0.25, 0.9])
    error = np.hypot(fit.standard_errors["request_p10"], fit.standard_errors["request_p90"])
    assert high - low == pytest.approx(1.6, abs=3 * error + 0.15)
    assert np.mean(effects > (low + high) / 2) == pytest.approx(1 / 3, abs=0.08)
    # A normal distribution of the same spread has most requests where these have fewest.
    assert np.mean(np.abs(effects - (low + high) / 2) < 0.3) < 0.25


def test_requests_that_are_normal_stay_so() -> None:
    log = draw(replace(PLAIN, request_spread=0.6), whole_blocks(16, 200, 4), seed=4)
    found, fit = fit_commits(log, workload="known", threshold=0.9)
    assert found.request_quantiles == ()
    assert abs(found.request_spread - 0.6) < 3 * fit.standard_errors["request_spread"]


@pytest.mark.slow
def test_standard_errors_of_the_tails_are_as_wide_as_logs_differ() -> None:
    found = [
        fit_commits(draw(TWO_KINDS, whole_blocks(16, 100, 5), seed=s), workload="k", threshold=0.9) for s in range(3)
    ]
    assert all(model.request_quantiles for model, _ in found)
    apart = [np.ptp(np.quantile(model.request_quantiles, [0.1, 0.9])) for model, _ in found]
    errors = [np.hypot(fit.standard_errors["request_p10"], fit.standard_errors["request_p90"]) for _, fit in found]
    assert np.std(apart, ddof=1) < 3 * np.mean(errors)
    assert np.mean(errors) < 1.0


def test_climbing_finds_weights_that_are_known() -> None:
    grid = np.arange(-40, 41) * 0.25
    truth = np.where(np.isin(grid, (-1.0, 1.0)), 0.5, 0.0)
    at = np.random.default_rng(0).choice(grid, size=500, p=truth) + 0.2 * np.random.default_rng(1).normal(size=500)
    seen = np.exp(-0.5 * ((at[:, None] - grid) / 0.2) ** 2)
    weight = climbed(seen, normal(grid, 0.7))
    assert weight.sum() == pytest.approx(1.0)
    assert weight[np.abs(np.abs(grid) - 1.0) < 0.3].sum() > 0.95


def test_a_spread_that_is_moved_keeps_the_shape() -> None:
    wider = scaled(TWO_KINDS, 0.7)
    assert np.ptp(wider.request_quantiles) == pytest.approx(2 * np.ptp(TWO_KINDS.request_quantiles))
    assert np.mean(wider.request_quantiles) == pytest.approx(np.mean(TWO_KINDS.request_quantiles))
    assert scaled(PLAIN, 0.7) == replace(PLAIN, request_spread=0.7)
