"""The least loaded replica, where compiled code and not `Router.route` chooses it."""

from typing import Any

from .jit import rule


@rule
def least_loaded(places: Any, figures: Any) -> int:
    """The first of the available `places` with the least sum of figures, columns of all replicas' counters."""
    best, lowest = -1, 0
    for k in range(len(places)):
        total = 0
        for column in figures:
            total += column[places[k]]
        if best < 0 or total < lowest:
            best, lowest = int(places[k]), total
    return best
