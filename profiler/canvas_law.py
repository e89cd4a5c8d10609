"""A law of forwards a canvas, or an edited block, moved to another mean."""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
from scipy.special import ndtri

from ..engine.commits import CanvasLaw
from .calibrate import bisected
from .profile import digits

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
    middle = math.log(forwards)
    _, high = bisected(
        lambda x: mean_forwards(replace(law, median=math.exp(x))) < forwards, middle - REACH, middle + REACH, 30
    )
    return replace(law, median=digits(math.exp(high), 5))
