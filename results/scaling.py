"""A scaler's behaviour: when the load rose, how soon a replica was added, and how often it reversed."""

from collections.abc import Sequence
from itertools import pairwise
from math import nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FLAP_WINDOW = 300.0  # s: opposite changes within it are a flap
RISE = 1.5  # times the lowest load since the last rise
PER_WINDOW = 100  # mean arrivals per window; a rise by half is then 5 standard deviations
SHORTEST = 60.0  # s, of a window

Changes = Sequence[Sequence[Any]]  # each: time (s), pool, replicas that take requests, replicas paid for


class Behaviour(NamedTuple):
    flaps: int  # reversals within FLAP_WINDOW
    rises: int  # of the load
    reaction: float  # s from a rise to the next replica that takes requests, mean over answered rises; NaN: none
    answered: int  # rises with a new replica before the next rise


def behaviour(changes: Changes, arrival: npt.NDArray[np.float64]) -> Behaviour:
    """The behaviour in a run with these changes (Result.changes) and arrivals (s)."""
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
    """The times at which the number of a pool's replicas that take requests changed, and the changes."""
    own = [change for change in changes if change[1] == pool]
    return [(float(b[0]), int(b[2] - a[2])) for a, b in pairwise(own) if b[2] != a[2]]


def _flaps(changes: Changes) -> int:
    found = 0
    for pool in dict.fromkeys(change[1] for change in changes):
        for (before, one), (after, other) in pairwise(_moves(changes, pool)):
            found += (one > 0) != (other > 0) and after - before < FLAP_WINDOW
    return found


def rises_of(arrival: npt.NDArray[np.float64]) -> list[float]:
    """The ends (s) of windows whose arrival rate reached RISE times the lowest since the last rise."""
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
