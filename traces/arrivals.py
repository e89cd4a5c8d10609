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

LEAST_CV, LARGEST_CV = 1e-3, 30.0  # of gamma
FIXED_CV = {"trace": math.nan, "poisson": 1.0, "constant": 0.0}


def gamma_gaps(u: Floats, cv: float) -> Floats:
    """Of mean 1 and shape 1/cv^2, vLLM's burstiness."""
    from scipy.special import gammaincinv  # a replay at the trace's times needs no SciPy

    shape = cv**-2
    return np.asarray(gammaincinv(shape, u), np.float64) / shape


GAPS: dict[str, Callable[[Floats, float], Floats]] = {
    "poisson": lambda u, _: -np.log1p(-u),
    "gamma": gamma_gaps,
    "constant": lambda u, _: np.ones_like(u),
}

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
    if not separator:
        return arrival, FIXED_CV.get(arrival, 1.0)
    cv = float_of(value)
    if arrival in FIXED_CV:
        raise TraceError(f"cv is {cut(value)}, expected none with {arrival} arrivals: gamma has any CV")
    if not LEAST_CV <= cv <= LARGEST_CV:
        raise TraceError(f"cv is {cut(value)}, expected {LEAST_CV:g} to {LARGEST_CV:g}")
    return arrival, cv
