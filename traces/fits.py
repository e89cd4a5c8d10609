"""A Gamma distribution for a trace's gaps, and its distance from them."""

import math
from dataclasses import dataclass

import numpy as np

from ..engine.errors import TraceError
from .arrivals import root
from .stats import FANO_WINDOWS, fano, gap_cv
from .trace import Floats, Trace

KS_DOUBT = 0.05  # above it the fit is doubtful


@dataclass(frozen=True, slots=True)
class GammaFit:
    """Gamma gaps by maximum likelihood, next to the trace's statistics."""

    rate: float  # req/s
    shape: float  # vLLM's burstiness
    scale: float  # s
    cv: float  # shape^-1/2
    trace_cv: float  # of the gaps
    ks: float  # Kolmogorov-Smirnov distance of the gaps
    zero_gaps: float  # share of gaps of 0, left out
    fano: dict[str, float | None]  # of the trace; about cv^2 at long windows for a renewal process

    @property
    def believable(self) -> bool:
        """Whether the Gamma is close; if not, replay the trace."""
        return self.ks <= KS_DOUBT


def fit(trace: Trace) -> GammaFit:
    """TraceError if there are too few gaps."""
    gaps = np.diff(trace.arrival)
    positive = gaps[gaps > 0]
    trace_cv = gap_cv(trace.arrival)
    if len(positive) < 10 or trace_cv is None:
        raise TraceError(f"{trace.name} has {len(positive)} gaps above 0 to fit, expected at least 10")
    shape = gamma_shape(positive)
    scale = float(positive.mean()) / shape
    return GammaFit(
        rate=trace.rate,
        shape=shape,
        scale=scale,
        cv=shape**-0.5,
        trace_cv=trace_cv,
        ks=distance(gaps, shape, scale),
        zero_gaps=1 - len(positive) / len(gaps),
        fano={f"{w:g}": fano(trace.arrival, w) for w in FANO_WINDOWS},
    )


def gamma_shape(gaps: Floats) -> float:
    """By maximum likelihood, log k - digamma(k) = log mean - mean log; at most 1e6."""
    from scipy.special import digamma

    target = math.log(float(gaps.mean())) - float(np.log(gaps).mean())

    def excess(log_shape: float) -> float:
        return log_shape - float(digamma(math.exp(log_shape))) - target

    return math.exp(root(excess, math.log(1e-3), math.log(1e6)))


def distance(gaps: Floats, shape: float, scale: float) -> float:
    """Kolmogorov-Smirnov, with ties and gaps of 0."""
    from scipy.special import gammainc

    value, counts = np.unique(gaps, return_counts=True)
    above = np.cumsum(counts) / len(gaps)
    below = above - counts / len(gaps)
    fitted = np.asarray(gammainc(shape, value / scale), np.float64)
    return float(np.maximum(np.abs(above - fitted), np.abs(fitted - below)).max())
