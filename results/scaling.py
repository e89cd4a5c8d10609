"""A scaler's behaviour: rises of the load, reactions, reversals."""

from collections.abc import Sequence
from itertools import pairwise
from math import nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FLAP_WINDOW = 300.0  # s between opposite changes
RISE = 1.5  # times the lowest load since the last rise
PER_WINDOW = 100  # mean arrivals; a rise by half is 5 standard deviations
SHORTEST = 60.0  # s

Changes = Sequence[Sequence[Any]]  # s, pool, serving replicas, paid replicas


class Behaviour(NamedTuple):
    flaps: int  # within FLAP_WINDOW
    rises: int  # of the load
    reaction: float  # mean s from a rise to a new serving replica; NaN: none
    answered: int  # rises, before the next one


def behaviour(changes: Changes, arrival: npt.NDArray[np.float64]) -> Behaviour:
    """changes: Result.changes; arrival: s."""
    moves = [move for pool in dict.fromkeys(change[1] for change in changes) for move in _moves(changes, pool)]
    moves.sort(key=lambda move: move[0])
    up = [time for time, by in moves if by > 0]
    rises = rises_of(arrival)
    took = []
    for start, end in zip(rises, [*rises[1:], np.inf], strict=False):
        first = next((time for time in up if start <= time < end), None)
        took += [] if first is None else [first - start]
    return Behaviour(_flaps(changes), len(rises), float(np.mean(took)) if took else nan, len(took))


def _moves(changes: Changes, pool: str) -> list[tuple[float, int]]:
    """Times and changes of a pool's serving replicas."""
    own = [change for change in changes if change[1] == pool]
    return [(float(b[0]), int(b[2] - a[2])) for a, b in pairwise(own) if b[2] != a[2]]


def _flaps(changes: Changes) -> int:
    found = 0
    for pool in dict.fromkeys(change[1] for change in changes):
        for (before, one), (after, other) in pairwise(_moves(changes, pool)):
            found += (one > 0) != (other > 0) and after - before < FLAP_WINDOW
    return found


def rises_of(arrival: npt.NDArray[np.float64]) -> list[float]:
    """s: ends of windows with RISE times the lowest rate since the last rise."""
    if not len(arrival):
        return []
    start, end = float(arrival.min()), float(arrival.max())
    width = max(SHORTEST, PER_WINDOW * (end - start) / len(arrival))
    windows = int((end - start) / width)
    counts, edges = np.histogram(arrival, start + width * np.arange(windows + 1)) if windows else (np.zeros(0), ())
    found: list[float] = []
    lowest = np.inf
    for count, edge in zip(counts.tolist(), edges[1:], strict=True):
        if count >= RISE * max(lowest, 1):
            found.append(float(edge))
            lowest = count
        lowest = min(lowest, count)
    return found
