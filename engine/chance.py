"""Keyed chance: a draw is a hash of its subject, independent of the order of draws.

The mixer is SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA 2014); uint64 wraps.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .jit import plain, rule

COMMIT, STEP_FACTOR, BLOCK_FACTOR, REQUEST_FACTOR, PADDING, ARRIVAL, LENGTH, PROMPT, IMPORTANCE, TOKEN, ESTIMATE = (
    range(1, 12)
)
ROUTE = 12

GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB


_GOLDEN, _MIX1, _MIX2 = np.uint64(GOLDEN), np.uint64(MIX1), np.uint64(MIX2)
_S12, _S27, _S30, _S31, _S54 = (np.uint64(s) for s in (12, 27, 30, 31, 54))


Word: TypeAlias = Any  # uint64, or an array


@rule
def mix64(word: Word) -> Word:
    word = (word ^ (word >> _S30)) * _MIX1
    word = (word ^ (word >> _S27)) * _MIX2
    return word ^ (word >> _S31)


mix = plain(mix64)


@rule
def key64(before: Word, value: Word) -> Word:
    """`before` extended by `part`, as in `key`."""
    return mix64((np.uint64(before) + _GOLDEN) ^ (np.uint64(value) * _MIX2))


@rule
def draw64(stream: Word, place: Word, time: Word) -> Word:
    """A stream's draw for a place and time."""
    return mix64((stream + np.uint64(place) * _GOLDEN) ^ (np.uint64(time) * _MIX1))


@rule
def uniform64(draw: Word) -> Any:
    """A number strictly between 0 and 1."""
    return (np.float64(draw >> _S12) + 0.5) * 2.0**-52


@rule
def pick64(draw: Word) -> Any:
    """An index into a table of 1024."""
    return np.int64(draw >> _S54)


def key(*parts: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """64-bit keys of whole numbers or arrays, broadcast; order matters."""
    z = np.zeros(1, np.uint64)
    for value in parts:
        z = mix((z + np.uint64(GOLDEN)) ^ (np.atleast_1d(np.asarray(value)).astype(np.uint64) * np.uint64(MIX2)))
    return z


def uniform(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    return ((keys >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
