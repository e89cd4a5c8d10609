"""Residuals: ln(measured / predicted) of a window's quantities. Each quantity belongs to one cause."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .replayed import Pace
from .sources.sample import Buckets
from .windows import Window

Residuals = dict[str, tuple[float, float]]  # by quantity: ln(measured / predicted), and its standard deviation
Figures = dict[str, float]  # by quantity: the logarithm of a window's

TRAFFIC, PRICES, YIELD, RULE = CAUSES = ("traffic", "prices", "yield", "rule")
LOAD = ("rate", "input_length", "output_length")  # compared with the usual
SMALL = {"running": 1.0, "waiting": 1.0}  # added to both: a ratio of counts near 0 means little
DISTRIBUTIONS = ("queue", "ttft", "e2el")
CAUSE_OF = dict.fromkeys(LOAD, TRAFFIC) | {"step_time": PRICES, "steps_per_token": YIELD}
CAUSE_OF |= dict.fromkeys((*SMALL, *DISTRIBUTIONS), RULE)
STEADY = 0.5  # variance over mean of the running requests, below which a limit bounds them
FEW = 20  # a histogram with fewer values is not compared


def residuals_of(measured: Figures, predicted: Sequence[Figures]) -> Residuals:
    """By quantity, the measured one less the mean of the predicted, and their standard deviation."""
    residuals = {}
    for name, value in measured.items():
        expected = np.array([other[name] for other in predicted if name in other])
        if len(expected) > 1 and math.isfinite(value) and np.isfinite(expected).all():
            residuals[name] = (value - float(expected.mean()), float(expected.std(ddof=1)))
    return residuals


def figures_of(window: Window, pace: Pace | None, by_token: bool, ends: Mapping[str, Buckets]) -> Figures:
    """The quantities of a window that a twin predicts.

    pace: of the twin's steps, for the price of a step at the measured load. by_token: a forward makes one token, as in
    autoregressive models. ends: the server's histograms; others are not compared.
    """
    figures: Figures = {}
    steps, tokens = window.added("steps"), window.added("generation_tokens")
    if by_token:
        steps = tokens
    if steps and tokens and not by_token:
        figures["steps_per_token"] = math.log(steps / tokens)
    if pace is not None and (price := _price(window, pace, steps)) is not None:
        figures["step_time"] = math.log(price)
    for name, small in SMALL.items():
        figures[name] = math.log(float(window.gauge(name)[1:].mean()) + small)
    for name in DISTRIBUTIONS:
        buckets = window.histogram(name)
        if name in ends and buckets is not None and buckets.num >= FEW:
            figures[name] = mean_log(buckets)
    return figures


def _price(window: Window, pace: Pace, steps: float | None) -> float | None:
    """The measured time of a step over the expected one, at the measured numbers of running requests.

    None if no step of the twin had such a number: the price would be extrapolated, and the number itself has changed.
    """
    running = window.gauge("running")
    gaps = np.diff(window.times)
    if seconds := window.added("forward_seconds"):
        forwards, levels = window.added("forwards"), np.maximum((running[1:] + running[:-1]) / 2, 1.0)
        busy = gaps * ((running[1:] + running[:-1]) > 0)
        if not forwards or not busy.sum():
            return None
        if not pace.covers(float(np.average(levels, weights=busy))):
            return None
        return seconds / forwards / float(np.average(pace.seconds(levels), weights=busy))
    if not steps or not running.any():
        return None
    e2el, queue = window.histogram("e2el"), window.histogram("queue")
    ran = float((gaps * (running[1:] + running[:-1]) / 2).sum())
    if e2el is not None and queue is not None:  # exact, apart from requests in flight at the window's ends
        ran = e2el.total - queue.total
    # A running request sees the others and itself: one more than the mean if arrivals are random, less if a limit
    # bounds the number. The gauge's measured spread is too noisy to be used directly.
    scatter = float(running.var() / running.mean())
    if scatter > STEADY:
        scatter = 1.0
    load = min(ran / window.duration + scatter, float(running.max()))
    if ran <= 0 or not pace.covers(load):
        return None
    return ran / float(pace.seconds(np.array([load]))[0]) / steps


def mean_log(buckets: Buckets) -> float:
    """The mean logarithm of a histogram's values, each taken at the middle of its bucket."""
    ends = np.array(buckets.ends)
    ends = np.maximum(ends, ends[ends > 0].min() / 2)  # a first bucket may end at 0
    low = np.append(ends[0] / 2, ends)
    high = np.append(ends, 2 * ends[-1])
    return float((buckets.shares * np.log(np.sqrt(low * high))).sum())


def share_within(buckets: Buckets, bound: float) -> tuple[float, float]:
    """Bounds of the share of values up to `bound`; they are equal if the bound is the end of a bucket."""
    if not buckets.num:
        return math.nan, math.nan
    shares = np.array((0.0, *buckets.counts)) / buckets.num
    least = int(np.searchsorted(buckets.ends, bound * (1 + 1e-9), side="right"))
    exact = least > 0 and math.isclose(buckets.ends[least - 1], bound, rel_tol=1e-9)
    return float(shares[least]), float(shares[min(least + (not exact), len(buckets.ends) + 1)])


def of_traffic(window: Window, usual: Mapping[str, float]) -> Residuals:
    """The residuals of a window's traffic relative to the usual, each with its sampling error."""
    residuals = {}
    for name, expected in usual.items():
        value = getattr(window, name)
        if expected > 0 and value > 0:
            residuals[name] = (math.log(value / expected), 1.0 / math.sqrt(max(1, window.num_arrivals)))
    return residuals
