"""Distributions in constant memory."""

import math

import numpy as np
import pytest

from dsim.engine.histogram import CountHistogram, TimeHistogram

SAMPLES = np.random.default_rng(0).lognormal(-3.0, 1.5, 100_001)
QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)


@pytest.mark.parametrize("num", [2, 11, 200, len(SAMPLES)])  # few values leave bins between them empty
def test_quantiles_are_right_to_half_a_bin_and_count_mean_least_and_greatest_exactly(num: int) -> None:
    h, samples = TimeHistogram(), SAMPLES[:num]
    h.add_many(samples)
    for q in QUANTILES:
        assert h.quantile(q) == pytest.approx(np.quantile(samples, q), rel=5e-4), q
    assert h.count == num
    assert h.mean() == pytest.approx(samples.mean(), rel=1e-12)
    assert (h.min, h.max) == (samples.min(), samples.max())


def test_one_by_one_all_at_once_and_merged_are_the_same() -> None:
    one, many, more = TimeHistogram(), TimeHistogram(), TimeHistogram()
    for value in SAMPLES[:2000].tolist():
        one.add(value)
    many.add_many(SAMPLES[:500])
    more.add_many(SAMPLES[500:2000])
    many.merge(more)
    many.merge(TimeHistogram())
    assert [one.quantile(q) for q in QUANTILES] == [many.quantile(q) for q in QUANTILES]
    assert (one.count, one.min, one.max) == (many.count, many.min, many.max)
    assert one.mean() == pytest.approx(many.mean(), rel=1e-12)


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
