"""Durations as people write them."""

import math
import re

from ..engine.errors import DsimError
from .read import quoted

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(name: str, text: str) -> float:
    """The s of an option: `90`, `90s`, `5m` or `1.5h`; else DsimError."""
    shape = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([smh]?)\s*", text)
    seconds = float(shape[1]) * UNITS[shape[2]] if shape else math.nan
    if not 0 < seconds < math.inf:
        raise DsimError(f"{name} is {quoted(text)}, expected more than 0 and finite, as in 90s, 5m or 1h")
    return seconds


def words_of(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
