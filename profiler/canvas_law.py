"""The mean of a law of forwards, and the law moved to another mean."""

import math
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from ..engine.commits import CanvasLaw
from ..engine.draw import CELLS, CELLS_PER_STD
from .calibrate import bisected
from .profile import digits

REACH = 4.0  # search range for the median's logarithm, ±


@cache
def _quantiles() -> npt.NDArray[np.float64]:
    from scipy.special import ndtri  # slow to import, and most profiles have no law

    return np.asarray(ndtri((np.arange(200) + 0.5) / 200), np.float64)


@lru_cache(maxsize=512)
def mean_forwards(law: CanvasLaw) -> float:
    """Mean forwards of requests' first canvases; with a histogram, of their later ones."""
    scores = law.request_spread * _quantiles()[:, None] + law.canvas_spread * _quantiles()
    if law.histogram:
        return mean_at(law, law.by_canvas[-1] if law.by_canvas else 0.0)
    return float(np.floor(law.median * np.exp(scores) + 0.5).clip(law.least, law.most).mean())


def mean_at(law: CanvasLaw, moved: float) -> float:
    """Mean forwards of a histogram's canvases, moved by `moved` standard deviations."""
    scores = law.request_spread * _quantiles()[:, None] + law.canvas_spread * _quantiles() + moved
    cells = np.floor(scores * CELLS_PER_STD).astype(np.int64) + CELLS // 2
    return float(law.forwards()[cells.clip(0, CELLS - 1)].mean())


@lru_cache(maxsize=512)
def with_mean(law: CanvasLaw, forwards: float) -> CanvasLaw:
    """The law with this mean of first canvases; with a histogram, all canvases move alike."""
    if law.histogram:
        shifts = law.by_canvas or (0.0,)
        _, high = bisected(lambda by: mean_at(law, shifts[-1] + by) < forwards, -REACH, REACH, 30)
        return replace(law, by_canvas=tuple(digits(by + high, 5) for by in shifts))
    middle = math.log(forwards)
    _, high = bisected(
        lambda x: mean_forwards(replace(law, median=math.exp(x))) < forwards, middle - REACH, middle + REACH, 30
    )
    return replace(law, median=digits(math.exp(high), 5))
