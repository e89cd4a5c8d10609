"""Errors of predictions: of paired values and of distributions."""

import math
from dataclasses import dataclass

import numpy as np

from ..results.metrics import Floats

LEAST = 1e-100  # smaller denominators count as zero: the quotient might overflow

DEFINITIONS = {
    "mape": "mean of |predicted - measured| / measured, over requests that completed in both runs",
    "median": "median of |predicted - measured| / measured, over the same",
    "p95": "95th percentile of |predicted - measured| / measured, over the same",
    "bias": "mean of (predicted - measured) / measured, over the same: below zero, the twin is too fast",
    "itl": "of a request, the mean gap between its emissions; of a run, the gaps of all requests together",
    "ks": "Kolmogorov-Smirnov distance: the largest gap between the two runs' cumulative distributions, 0 to 1",
    "error": "(predicted - measured) / measured, of a run's mean, percentile or total",
}


@dataclass(frozen=True)
class Errors:
    """Relative errors; NaN without pairs."""

    num: int  # pairs
    mape: float
    median: float
    p95: float
    bias: float
    num_missing: int  # pairs left out for a missing value
    num_zero: int  # ... for a measured zero


def errors(predicted: Floats, measured: Floats) -> Errors:
    """Relative errors of pairs; NaN marks a missing value."""
    known = ~(np.isnan(predicted) | np.isnan(measured))
    some = known & (measured > LEAST)
    relative = (predicted[some] - measured[some]) / measured[some]
    num_missing, num_zero = int((~known).sum()), int((known & ~some).sum())
    if not len(relative):
        return Errors(0, math.nan, math.nan, math.nan, math.nan, num_missing, num_zero)
    size = np.abs(relative)
    median, p95 = (float(q) for q in np.percentile(size, [50, 95]))
    return Errors(len(size), float(size.mean()), median, p95, float(relative.mean()), num_missing, num_zero)


def relative_error(predicted: float | None, measured: float | None) -> float:
    """(predicted - measured) / measured; NaN if a value is missing or the measured one is zero."""
    if predicted is None or measured is None or abs(measured) <= LEAST:
        return math.nan
    return (predicted - measured) / measured


def ks_distance(a: Floats, b: Floats) -> float:
    """Kolmogorov-Smirnov distance of two samples, without NaN."""
    a, b = np.sort(a[~np.isnan(a)]), np.sort(b[~np.isnan(b)])
    if not len(a) or not len(b):
        return math.nan
    at = np.concatenate([a, b])
    gaps = np.searchsorted(a, at, side="right") / len(a) - np.searchsorted(b, at, side="right") / len(b)
    return float(np.abs(gaps).max())
