"""Arrival processes: request times, keyed by index, so that a seed gives the same times.

Each gap is an inverse distribution function of one draw: a longer run begins with the shorter one, and runs at two
rates or CVs are paired.
"""

import math
from collections.abc import Callable

import numpy as np

from ..engine import chance
from ..engine.errors import TraceError
from .trace import Floats, check_rate

CV_RANGE = {"gamma": (1e-3, 30.0), "weibull": (1e-2, 30.0)}
CV_TOLERANCE = 1e-3  # relative, between given CV and burstiness


def poisson_gaps(u: Floats, cv: float) -> Floats:
    return -np.log1p(-u)


def gamma_gaps(u: Floats, cv: float) -> Floats:
    """Of mean 1 and shape 1/cv^2, vLLM's burstiness."""
    from scipy.special import gammaincinv  # a replay at the trace's times needs no SciPy

    shape = cv**-2
    return np.asarray(gammaincinv(shape, u), np.float64) / shape


def weibull_gaps(u: Floats, cv: float) -> Floats:
    from scipy.special import gammaln

    shape = weibull_shape(cv)
    return (-np.log1p(-u)) ** (1 / shape) / math.exp(gammaln(1 + 1 / shape))


def constant_gaps(u: Floats, cv: float) -> Floats:
    return np.ones_like(u)


GAPS: dict[str, Callable[[Floats, float], Floats]] = {
    "poisson": poisson_gaps,
    "gamma": gamma_gaps,
    "weibull": weibull_gaps,
    "constant": constant_gaps,
}
FIXED_CV = {"poisson": 1.0, "constant": 0.0}

# For --arrival; "trace" is the trace's times.
ARRIVALS = ("trace", *GAPS, "burstgpt-like")


def renewal(arrival: str, num_requests: int, rate: float, cv: float, seed: int) -> Floats:
    """Times (s), the first at 0."""
    check_rate(rate)
    u = chance.uniform(chance.key(seed, chance.ARRIVAL, np.arange(1, num_requests)))
    return np.concatenate(([0.0], np.cumsum(GAPS[arrival](u, cv)) / rate))


def resolve_cv(arrival: str, cv: float | None, burstiness: float | None) -> float:
    """The gaps' CV from --cv or --burstiness (cv = burstiness^-1/2); TraceError if the process cannot have it."""
    for name, value in (("cv", cv), ("burstiness", burstiness)):
        if value is not None and not 0 <= value < math.inf:
            raise TraceError(f"{name} is {value}, expected a finite number above 0")
    if burstiness == 0:
        raise TraceError("burstiness is 0.0, expected a finite number above 0")
    wanted = cv if cv is not None else None if burstiness is None else burstiness**-0.5
    if cv is not None and burstiness is not None and abs(cv - burstiness**-0.5) > CV_TOLERANCE * cv:
        raise TraceError(f"cv is {cv} but burstiness {burstiness} means {burstiness**-0.5:.6g}, expected one of them")
    if arrival not in GAPS:
        if wanted is not None:
            raise TraceError(f"cv is {wanted:g}, expected none with {arrival} arrivals: they have one of their own")
        return math.nan
    fixed = FIXED_CV.get(arrival)
    if fixed is not None:
        if wanted is not None and abs(wanted - fixed) > CV_TOLERANCE:
            raise TraceError(f"cv is {wanted:g}, expected {fixed:g} with {arrival} arrivals: gamma has any CV")
        return fixed
    low, high = CV_RANGE[arrival]
    if wanted is not None and not low <= wanted <= high:
        raise TraceError(f"cv is {wanted:g}, expected {low:g} to {high:g} for {arrival} arrivals")
    return 1.0 if wanted is None else wanted


def weibull_shape(cv: float) -> float:
    """The Weibull shape of this CV, by bisection on its logarithm."""
    from scipy.special import gammaln

    def excess(log_shape: float) -> float:
        shape = math.exp(log_shape)
        return float(gammaln(1 + 2 / shape) - 2 * gammaln(1 + 1 / shape)) - math.log1p(cv**2)

    return math.exp(root(excess, math.log(0.05), math.log(500.0)))


def root(falling: Callable[[float], float], low: float, high: float) -> float:
    """The zero of a falling function, to the last bit; else the nearer end."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
