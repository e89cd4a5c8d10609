"""How requests differ: logs drawn from a known distribution give it back, and published pairs and classes are met."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsim.engine.commits import CommitDraws, CommitModel
from dsim.engine.errors import ProfileError
from dsim.profiler.fit_commits import fit_commits
from dsim.profiler.given_yield import given_yield
from dsim.profiler.profile import from_json, load, to_json
from dsim.profiler.request_effects import climbed, mean_yield, mixture, normal, scaled, shifted, with_tail
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


def test_a_published_pair_gives_the_spread_and_keeps_the_mean() -> None:
    for tail in (1.2, 1.5):
        found = with_tail(PLAIN, tail)
        assert mean_yield(found) == pytest.approx(mean_yield(PLAIN), rel=0.02)
    assert with_tail(PLAIN, 1.5).request_spread > with_tail(PLAIN, 1.2).request_spread > 0.0
    with pytest.raises(ProfileError, match=r"p90 over p50 is 1, expected 1\.\d+ \(requests that are alike\)"):
        with_tail(PLAIN, 1.0)


def test_classes_keep_their_own_yields_in_a_mixture() -> None:
    found = mixture(replace(PLAIN, request_spread=0.0), [2.0, 5.0], [3.0, 1.0])
    effects = np.array(found.request_quantiles)
    middle = (effects[0] + effects[-1]) / 2
    assert np.mean(effects > middle) == pytest.approx(0.25, abs=0.02)
    for own, mean in ((effects[0], 2.0), (effects[-1], 5.0)):
        alone = shifted(replace(PLAIN, request_spread=0.0), own)
        assert mean_yield(alone) == pytest.approx(mean, rel=0.03)


def test_a_table_of_yields_has_tails_and_classes(tmp_path: Path) -> None:
    table = tmp_path / "yields.csv"
    table.write_text("threshold,yield,p90_over_p50\n0.9,2.2,1.4\n")
    [model] = given_yield(str(table), 8, 0.9)
    assert model.request_spread != 0.35
    assert mean_yield(model) == pytest.approx(2.2, rel=0.03)
    table.write_text("threshold,yield,p90_over_p50\n0.9,2.2,9.4\n")
    with pytest.raises(ProfileError, match=r"yields\.csv:2: p90 over p50 is 9\.4, expected 1"):
        given_yield(str(table), 8, 0.9)
    table.write_text("threshold,yield,class,share\n0.9,2.0,prose,0.5\n0.9,4.0,code,0.5\n")
    [model] = given_yield(str(table), 8, 0.9)
    # Over steps, of which prose has twice as many a token.
    assert mean_yield(model) == pytest.approx(1 / (0.5 / 2 + 0.5 / 4), rel=0.04)
    table.write_text("threshold,yield\n0.9,2.0\n0.9,4.0\n")
    with pytest.raises(ProfileError, match=r":3: threshold 0\.9 is given a second time, expected a share"):
        given_yield(str(table), 32, 0.9)


def test_a_spread_that_is_moved_keeps_the_shape() -> None:
    wider = scaled(TWO_KINDS, 0.7)
    assert np.ptp(wider.request_quantiles) == pytest.approx(2 * np.ptp(TWO_KINDS.request_quantiles))
    assert np.mean(wider.request_quantiles) == pytest.approx(np.mean(TWO_KINDS.request_quantiles))
    assert scaled(PLAIN, 0.7) == replace(PLAIN, request_spread=0.7)


def test_quantiles_are_kept_in_a_profile_and_must_rise() -> None:
    profile = load("a100-sdar-8b")
    profile = replace(profile, commits=(replace(profile.commits[0], request_quantiles=(-1.0, 0.0, 2.0)),))
    data = to_json(profile)
    assert from_json(data, "p.json") == profile
    assert isinstance(data, dict)
    data["commits"][0]["request_quantiles"] = [0.0, -1.0]
    with pytest.raises(ProfileError, match=r"request_quantiles\[1\] is -1\.0, expected at least the one before, 0"):
        from_json(data, "p.json")
