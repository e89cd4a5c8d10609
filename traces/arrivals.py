"""Arrival processes: request times, keyed by index, so that a seed gives the same times.

Each gap is an inverse distribution function of one draw: a longer run begins with the shorter one, and runs at two
rates or CVs are paired.
"""

import math
from collections.abc import Callable

import numpy as np

from ..engine import chance
from ..engine.errors import TraceError
from ..files.read import cut, float_of
from .trace import Floats, check_rate

CV_RANGE = {"gamma": (1e-3, 30.0), "weibull": (1e-2, 30.0)}
CV_TOLERANCE = 1e-3  # of a process that has one CV


def gamma_gaps(u: Floats, cv: float) -> Floats:
    """Of mean 1 and shape 1/cv^2, vLLM's burstiness."""
    from scipy.special import gammaincinv  # a replay at the trace's times needs no SciPy

    shape = cv**-2
    return np.asarray(gammaincinv(shape, u), np.float64) / shape


def weibull_gaps(u: Floats, cv: float) -> Floats:
    from scipy.special import gammaln

    shape = weibull_shape(cv)
    return (-np.log1p(-u)) ** (1 / shape) / math.exp(gammaln(1 + 1 / shape))


GAPS: dict[str, Callable[[Floats, float], Floats]] = {
    "poisson": lambda u, _: -np.log1p(-u),
    "gamma": gamma_gaps,
    "weibull": weibull_gaps,
    "constant": lambda u, _: np.ones_like(u),
}
FIXED_CV = {"poisson": 1.0, "constant": 0.0}

# For --arrival; "trace" is the trace's times.
ARRIVALS = ("trace", *GAPS)


def renewal(arrival: str, num_requests: int, rate: float, cv: float, seed: int) -> Floats:
    """Times (s), the first at 0."""
    check_rate(rate)
    u = chance.uniform(chance.key(seed, chance.ARRIVAL, np.arange(1, num_requests)))
    return np.concatenate(([0.0], np.cumsum(GAPS[arrival](u, cv)) / rate))


def process_of(text: str) -> tuple[str, float]:
    """`gamma,cv=2`: the process and the CV of its gaps, by default 1; TraceError if the process cannot have it."""
    arrival, separator, value = text.partition(",cv=")
    if arrival not in ARRIVALS:
        raise TraceError(f"no arrival process named {cut(arrival)}, expected one of: {', '.join(ARRIVALS)}")
    cv = float_of(value) if separator else None
    if cv is not None and not 0 <= cv < math.inf:
        raise TraceError(f"cv is {cv}, expected a finite number above 0")
    if arrival not in GAPS:
        if cv is not None:
            raise TraceError(f"cv is {cv:g}, expected none with {arrival} arrivals: they have one of their own")
        return arrival, math.nan
    fixed = FIXED_CV.get(arrival)
    if fixed is not None:
        if cv is not None and abs(cv - fixed) > CV_TOLERANCE:
            raise TraceError(f"cv is {cv:g}, expected {fixed:g} with {arrival} arrivals: gamma has any CV")
        return arrival, fixed
    low, high = CV_RANGE[arrival]
    if cv is not None and not low <= cv <= high:
        raise TraceError(f"cv is {cv:g}, expected {low:g} to {high:g} for {arrival} arrivals")
    return arrival, 1.0 if cv is None else cv


def weibull_shape(cv: float) -> float:
    """The Weibull shape of this CV, by bisection on its logarithm."""
    from scipy.special import gammaln

    def excess(log_shape: float) -> float:
        shape = math.exp(log_shape)
        return float(gammaln(1 + 2 / shape) - 2 * gammaln(1 + 1 / shape)) - math.log1p(cv**2)

    low, high = math.log(0.05), math.log(500.0)
    for _ in range(80):  # to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return math.exp((low + high) / 2)
