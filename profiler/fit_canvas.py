"""The law of steps a canvas, fitted to a step log's canvases."""

from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.special import ndtri
from scipy.stats import rankdata

from ..engine.commits import CanvasLaw
from .logged import FEW_CANVASES, Canvases
from .profile import digits
from .samples import Bools, Floats, Ints

BUCKET = 10  # least canvases per bucket: its share has an error of a third


def fit_canvas_law(
    canvases: Canvases, *, workload: str, canvas_length: int, late: bool, source: str
) -> tuple[CanvasLaw, list[str]]:
    """The law with the canvases' histogram, and the doubts about it; late: a separate pass emits a canvas, not counted.

    Spreads are those of normal quantiles of ranks; first canvases are compared with later ones. Variances are scaled to
    a total of 1, so that drawn canvases have the histogram's shares. A canvas that its request's limit ended counts as
    a longer one (`_unlimited`).
    """
    steps = np.maximum(1, canvases.num_steps - late * canvases.flushed)
    _, who, counts = np.unique(canvases.request, return_inverse=True, return_counts=True)
    index = np.asarray(pd.Series(who).groupby(who).cumcount(), np.int64)  # within its request
    origin = f"{source}; {len(who)} canvases of {len(counts)} requests"
    if canvases.limit is not None and (ended := steps >= canvases.limit).any():
        steps = _unlimited(steps, ended)
        origin += f", {ended.sum()} ended by their requests' limits"
    doubts = []
    if len(steps) < FEW_CANVASES:
        doubts.append(f"{len(steps)} canvases were emitted, expected at least {FEW_CANVASES} to estimate spreads")
    if len(steps) == len(counts):
        doubts.append("no request has two canvases: the spreads of requests and of canvases cannot be separated")
    law = CanvasLaw(
        workload=workload,
        canvas_length=canvas_length,
        median=digits(float(np.median(steps))),
        least=int(steps.min()),
        most=int(steps.max()),
        source=origin,
    )
    if law.least == law.most:
        return law, doubts
    scores = ndtri((rankdata(steps) - 0.5) / len(steps))
    later = (index > 0).astype(np.float64)
    inside = _centred(later, who, counts)
    scatter = max(float(inside @ inside), 1e-9)
    moved = float(inside @ _centred(scores, who, counts)) / scatter
    shift = moved * (later - later.mean())
    between, within = _variances(scores - shift, who, counts)
    scale = max(0.0, 1.0 - float(shift.var())) / (between + within)
    law = replace(
        law,
        request_spread=digits((between * scale) ** 0.5),
        canvas_spread=digits((within * scale) ** 0.5),
        histogram=_buckets(steps),
        by_canvas=(digits(-moved * float(later.mean())), digits(moved * float(1.0 - later.mean()))),
    )
    return law, doubts


def _unlimited(steps: Ints, ended: Bools) -> Ints:
    """The steps [canvases] without limits. ended [canvases]: by a limit, so that they would have taken at least these.

    The share of canvases that stop at a number of steps, of those that reach it and may go on, is that of the product
    limit estimator. An ended canvas draws from it, independently of its request's others. What no canvas tells of is
    the largest number in the log.
    """
    greatest = int(steps.max())
    stopped, limited = (np.bincount(steps[which], minlength=greatest + 1) for which in (~ended, ended))
    reached = np.cumsum((stopped + limited)[::-1])[::-1] - limited  # an ended canvas may have stopped at its limit
    goes_on = np.cumprod(1.0 - stopped / np.maximum(reached, 1))  # to more steps than these, from the first on
    remaining = np.append(1.0, goes_on)[steps[ended]] * (1.0 - np.random.default_rng(0).random(int(ended.sum())))
    unlimited = steps.copy()
    unlimited[ended] = np.minimum(np.searchsorted(-goes_on, -remaining, side="right"), greatest)
    return unlimited


def _buckets(steps: Ints) -> tuple[tuple[int, float], ...]:
    """Largest count and share of each bucket; a common count has its own."""
    buckets, pending = [], 0
    num = np.bincount(steps)
    for count in range(int(steps.min()), len(num)):
        pending += int(num[count])
        last = count + 1 == len(num)
        if last or pending >= BUCKET or (pending > 0 and num[count + 1] >= BUCKET):
            buckets.append((count, digits(pending / len(steps))))
            pending = 0
    return tuple(buckets)


def _variances(values: Floats, who: Ints, counts: Ints) -> tuple[float, float]:
    """The variances between and within requests: a one-way analysis of variance with groups of different sizes."""
    mean = np.bincount(who, values) / counts
    free = max(1, len(values) - len(counts))
    within = float(((values - mean[who]) ** 2).sum()) / free
    if len(counts) == 1:
        return 0.0, within
    size = (len(values) - float((counts**2).sum()) / len(values)) / (len(counts) - 1)
    squares = float((counts * (mean - np.average(mean, weights=counts)) ** 2).sum()) / (len(counts) - 1)
    return max(0.0, (squares - within) / size), within


def _centred(values: Floats, who: Ints, counts: Ints) -> Floats:
    centred: Floats = values - (np.bincount(who, values) / counts)[who]
    return centred
