"""The mean of a law of forwards, and the law moved to another mean."""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ..engine.commits import CanvasLaw
from ..engine.draw import CELLS, CELLS_PER_STD
from .calibrate import bisected
from .profile import digits
from .samples import Floats

REACH = 4.0  # search range for the median's logarithm, ±


@lru_cache(maxsize=8)
def _scores(law: CanvasLaw) -> Floats:
    """Standard scores of canvases [requests, canvases], at even quantiles."""
    from scipy.special import ndtri  # slow to import, and most profiles have no law

    quantiles = ndtri((np.arange(200) + 0.5) / 200)
    return np.asarray(law.request_spread * quantiles[:, None] + law.canvas_spread * quantiles, np.float64)


@lru_cache(maxsize=512)
def mean_forwards(law: CanvasLaw) -> float:
    """Mean forwards of requests' first canvases; with a histogram, of their later ones."""
    if law.histogram:
        return mean_at(law, (law.by_canvas or (0.0,))[-1])
    return float(np.floor(law.median * np.exp(_scores(law)) + 0.5).clip(law.least, law.most).mean())


def mean_at(law: CanvasLaw, moved: float) -> float:
    """Mean forwards of a histogram's canvases, moved by `moved` standard deviations."""
    cells = np.floor((_scores(law) + moved) * CELLS_PER_STD).astype(np.int64) + CELLS // 2
    return float(law.forwards()[cells.clip(0, CELLS - 1)].mean())


@lru_cache(maxsize=512)
def with_mean(law: CanvasLaw, forwards: float) -> CanvasLaw:
    """The law with this mean of first canvases; with a histogram, all canvases move alike."""
    if law.histogram:
        shifts = law.by_canvas or (0.0,)
        _, high = bisected(lambda shift: mean_at(law, shifts[-1] + shift) < forwards, -REACH, REACH, 30)
        return replace(law, by_canvas=tuple(digits(shift + high, 5) for shift in shifts))
    middle = math.log(forwards)
    _, high = bisected(
        lambda x: mean_forwards(replace(law, median=math.exp(x))) < forwards, middle - REACH, middle + REACH, 30
    )
    return replace(law, median=digits(math.exp(high), 5))
