"""A law of forwards a canvas, or an edited block, moved to another mean."""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
from scipy.special import ndtri

from ..engine.commits import CanvasLaw

REACH = 4.0  # of the logarithm of the mean, either way, in which the median is looked for
QUANTILES = ndtri((np.arange(200) + 0.5) / 200)


@lru_cache(maxsize=512)
def mean_forwards(law: CanvasLaw) -> float:
    """The mean of requests' first canvases."""
    steps = law.median * np.exp(law.request_spread * QUANTILES[:, None] + law.canvas_spread * QUANTILES)
    return float(np.floor(steps + 0.5).clip(law.least, law.most).mean())


@lru_cache(maxsize=512)
def with_mean(law: CanvasLaw, forwards: float) -> CanvasLaw:
    """The law with the median that gives its first canvases that mean, from its `least` to its `most`."""
    low, high = math.log(forwards) - REACH, math.log(forwards) + REACH
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_forwards(replace(law, median=math.exp(middle))) < forwards else (low, middle)
    return replace(law, median=float(f"{math.exp(high):.5g}"))
