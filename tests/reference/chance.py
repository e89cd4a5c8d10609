"""Oracle of keyed draws: streams of requests and entries of tables of 1024, on whole arrays of wrapping uint64."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dsim.engine.chance import GOLDEN, MIX1, MIX2, mix
from dsim.engine.draw import Draws


def streams(d: Draws, requests: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Each row's streams of draws for commits, steps and blocks: [rows, 3]."""
    own = requests.astype(np.uint64)[:, None] * np.uint64(MIX2)
    return mix((d.streams[:3] + np.uint64(GOLDEN)) ^ own)  # type: ignore[no-any-return]


def pick(keys: npt.NDArray[np.uint64], a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """An entry of a table of 1024, by key."""
    place = a.astype(np.uint64) * np.uint64(GOLDEN)
    return (mix((keys + place) ^ (b.astype(np.uint64) * np.uint64(MIX1))) >> np.uint64(54)).astype(np.intp)
