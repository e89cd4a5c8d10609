"""Distributions in constant memory."""

import math

import numpy as np
import pytest

from dsim.engine.histogram import CountHistogram, TimeHistogram

SAMPLES = np.random.default_rng(0).lognormal(-3.0, 1.5, 100_001)
QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)


def test_quantiles_are_right_to_a_tenth_of_a_percent() -> None:
    h = TimeHistogram()
    h.add_many(SAMPLES)
    for q in QUANTILES:
        assert h.quantile(q) == pytest.approx(np.quantile(SAMPLES, q), rel=1e-3), q


def test_count_mean_least_and_greatest_are_exact() -> None:
    h = TimeHistogram()
    h.add_many(SAMPLES)
    assert h.count == len(SAMPLES)
    assert h.mean() == pytest.approx(SAMPLES.mean(), rel=1e-12)
    assert (h.min, h.max) == (SAMPLES.min(), SAMPLES.max())


def test_one_by_one_and_all_at_once_are_the_same() -> None:
    one, many = TimeHistogram(), TimeHistogram()
    for value in SAMPLES[:2000].tolist():
        one.add(value)
    many.add_many(SAMPLES[:2000])
    assert [one.quantile(q) for q in QUANTILES] == [many.quantile(q) for q in QUANTILES]
    assert (one.count, one.min, one.max) == (many.count, many.min, many.max)
    assert one.mean() == pytest.approx(many.mean(), rel=1e-12)


def test_merging_is_counting_both() -> None:
    a, b, both = TimeHistogram(), TimeHistogram(), TimeHistogram()
    a.add_many(SAMPLES[:500])
    b.add_many(SAMPLES[500:3000] * 100)
    both.add_many(np.concatenate([SAMPLES[:500], SAMPLES[500:3000] * 100]))
    a.merge(b)
    a.merge(TimeHistogram())
    assert [a.quantile(q) for q in QUANTILES] == [both.quantile(q) for q in QUANTILES]
    assert (a.count, a.min, a.max) == (both.count, both.min, both.max)
    assert a.mean() == pytest.approx(both.mean(), rel=1e-12)


def test_equal_values_have_one_quantile_exactly() -> None:
    h = TimeHistogram()
    h.add(0.04156, 1000)
    assert {h.quantile(q) for q in QUANTILES} == {0.04156}


def test_times_outside_the_bins_keep_their_extremes() -> None:
    h = TimeHistogram()
    h.add_many(np.array([0.0, 1.0, 1e9]))
    h.add(0.0)
    assert (h.count, h.min, h.max) == (4, 0.0, 1e9)
    assert h.quantile(0.0) == pytest.approx(0.0, abs=2e-7)


def test_an_empty_histogram_has_no_mean_and_no_quantile() -> None:
    h = TimeHistogram()
    h.add_many(np.zeros(0))
    assert h.count == 0
    assert math.isnan(h.mean())
    assert math.isnan(h.quantile(0.5))
    assert math.isnan(CountHistogram().mean())
    assert math.isnan(CountHistogram().quantile(0.5))


def test_counts_are_exact() -> None:
    a, b = CountHistogram(), CountHistogram()
    for value in (3, 1, 4, 1, 5):
        a.add(value)
    for value in (9, 2, 6):
        b.add(value)
    a.merge(b)
    assert a.mean() == 31 / 8
    values = sorted([3, 1, 4, 1, 5, 9, 2, 6])
    for q in (0.0, 0.1, 0.25, 0.5, 0.9, 1.0):
        assert a.quantile(q) == np.quantile(values, q, method="lower")
