"""Errors of predictions."""

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
    "error": "(predicted - measured) / measured, of a run's mean, percentile or total",
}


@dataclass(frozen=True)
class Errors:
    """Relative errors; None without pairs."""

    num: int  # pairs
    num_missing: int  # pairs left out for a missing value
    num_zero: int  # ... for a measured zero
    mape: float | None = None
    median: float | None = None
    p95: float | None = None
    bias: float | None = None


def errors(predicted: Floats, measured: Floats) -> Errors:
    """Relative errors of pairs; NaN marks a missing value."""
    missing = np.isnan(predicted) | np.isnan(measured)
    zero = ~missing & (measured <= LEAST)
    pairs = ~missing & ~zero
    relative = (predicted[pairs] - measured[pairs]) / measured[pairs]
    counts = {"num": len(relative), "num_missing": int(missing.sum()), "num_zero": int(zero.sum())}
    if not len(relative):
        return Errors(**counts)
    size = np.abs(relative)
    median, p95 = np.percentile(size, [50, 95]).tolist()
    return Errors(**counts, mape=float(size.mean()), median=median, p95=p95, bias=float(relative.mean()))


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """(predicted - measured) / measured; None if a value is missing or the measured one is zero."""
    if predicted is None or measured is None or abs(measured) <= LEAST:
        return None
    return (predicted - measured) / measured
