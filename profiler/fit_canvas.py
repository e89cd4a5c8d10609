"""The law of steps a canvas, fitted to the canvases of a step log."""

import numpy as np

from ..engine.commits import CanvasLaw
from .logged import Canvases
from .profile import digits
from .samples import Floats, Ints

FEW = 30  # canvases: fewer say little of a spread
ROUNDING = 1 / 12  # variance of a count's rounding, in steps squared


def fit_canvas_law(
    canvases: Canvases, *, workload: str, canvas_length: int, late: bool, source: str
) -> tuple[CanvasLaw, list[str]]:
    """The law, and why not to believe it. late: canvases are handed out by a pass of their own, which is no step.

    Logarithms of steps are a typical canvas's, plus the request's own, the canvas's own, and the drift times the
    canvas's index. Drift is told within requests, the spreads by the variance within and between them.
    """
    steps = np.maximum(1, canvases.num_steps - (canvases.flushed if late else 0))
    _, who, counts = np.unique(canvases.request, return_inverse=True, return_counts=True)
    index = _index(who)
    y = np.log(steps)
    inside = _centred(index.astype(np.float64), who, counts)
    scatter = float(inside @ inside)
    drift = float(inside @ _centred(y, who, counts)) / scatter if scatter > 0 else 0.0
    rest = y - drift * index
    # Counts are rounded: that adds variance which is not the law's.
    rounding = float((ROUNDING / steps.astype(np.float64) ** 2).mean())
    mean = np.bincount(who, rest) / counts
    free = len(rest) - len(counts)
    within = float(((rest - mean[who]) ** 2).sum()) / free if free > 0 else 0.0
    center = float(np.average(mean, weights=counts))
    between = 0.0
    if len(counts) > 1:
        # One-way analysis of variance, the groups of different sizes.
        size = (len(rest) - float((counts**2).sum()) / len(rest)) / (len(counts) - 1)
        squares = float((counts * (mean - center) ** 2).sum()) / (len(counts) - 1)
        between = max(0.0, (squares - within) / size) if free > 0 else squares
    doubts = []
    if len(rest) < FEW:
        doubts.append(f"{len(rest)} canvases were handed out, expected at least {FEW} to tell spreads")
    if free <= 0:
        doubts.append("no request has two canvases: the spread of a request and of a canvas are not told apart")
    law = CanvasLaw(
        workload, canvas_length, digits(float(np.exp(center))), digits(between**0.5),
        digits(max(0.0, within - rounding) ** 0.5), digits(float(np.exp(drift))), int(steps.min()), int(steps.max()),
        source,
    )  # fmt: skip
    return law, doubts


def _index(who: Ints) -> Ints:
    """Of each canvas, how many of its request's came before it."""
    order = np.argsort(who, kind="stable")
    ordered = who[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    index = np.empty(len(who), np.int64)
    index[order] = np.arange(len(who)) - np.repeat(begins, np.diff([*begins, len(who)]))
    return index


def _centred(values: Floats, who: Ints, counts: Ints) -> Floats:
    """The values less their request's mean."""
    centred: Floats = values - (np.bincount(who, values) / counts)[who]
    return centred
