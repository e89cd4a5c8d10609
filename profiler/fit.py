"""Fit a latency model to measured steps, and say whether to believe it."""

from ..engine.latency import LatencyModel
from .profile import Fit
from .samples import Bools, Samples


def fit_latency(taken: Samples, held_out: Bools | None = None) -> tuple[LatencyModel, Fit]:
    """The model of least relative squares over the points (medians of repeats), and how far to trust it.

    held_out: the points, in the order of `points(taken)`, that judge the fit and take no part in it; every fifth by
    default.
    """
    raise NotImplementedError
