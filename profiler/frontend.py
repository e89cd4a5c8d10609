"""The front end between clients and the engine: a fixed time, plus a queue with one server.

The server (HTTP, tokenising, hand-over) takes the same time for every request, first come, first served: its delay
grows with load. Both delay a request on its way in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..engine.errors import DsimError

Floats = npt.NDArray[np.float64]

FEWEST = 20  # requests to tell a service time from a fixed one
LEAST_SERVICE = 1e-4  # s; less is clock noise
TRIED = 200  # service times, evenly spread


@dataclass(frozen=True)
class FrontEnd:
    fixed: float = 0.0  # s, both directions together
    service: float = 0.0  # s per request

    def __post_init__(self) -> None:
        for name in ("fixed", "service"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                shown = "frontend" if name == "fixed" else "frontend_service"
                raise DsimError(f"{shown} is {value} s, expected at least 0 and finite")

    def reach(self, arrival: Floats) -> Floats:
        """When requests reach the engine (s), from arrival times in the order of sending."""
        if not self.service:
            return arrival + self.fixed
        turn = self.service * np.arange(len(arrival))
        served: Floats = np.maximum.accumulate(arrival - turn) + (turn + self.service)
        return served + self.fixed


NO_FRONT_END = FrontEnd()


class Queue:
    """The front end's queue during a run; requests join in the order of sending."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front
        self._free = -math.inf

    def reach(self, arrival: float) -> float:
        """When a request sent at `arrival` reaches the engine (s)."""
        front = self._front
        if not front.service:
            return arrival + front.fixed
        self._free = max(arrival, self._free) + front.service
        return self._free + front.fixed


def fit_front_end(sent: Floats, outside: Sequence[float] | Floats) -> FrontEnd:
    """Fit a front end to requests' time outside the engine.

    sent: s, at the client. outside: s between client and engine, NaN: unknown. The service time minimises the mean
    absolute residual; the fixed part is the residuals' median. The service time is 0 unless it raises their
    log-likelihood (Laplace) by more than the logarithm of their number.
    """
    order = np.argsort(sent, kind="stable")
    sent, seen = np.asarray(sent)[order], np.asarray(outside)[order]
    known = ~np.isnan(seen)
    seen = seen[known]
    constant = FrontEnd(max(0.0, float(np.median(seen))))
    if len(seen) < FEWEST:
        return constant

    def at(service: float) -> tuple[float, FrontEnd]:
        own = FrontEnd(0.0, service).reach(sent)[known] - sent[known]
        found = FrontEnd(max(0.0, float(np.median(seen - own))), service)
        return float(np.abs(seen - own - found.fixed).mean()), found

    most = float(np.percentile(seen, 95))  # every request takes at least the service time
    best = min((at(service) for service in np.linspace(0.0, most, TRIED).tolist()), key=lambda tried: tried[0])
    for width in (most / TRIED, most / TRIED**2):  # two finer grids around the best
        near = np.clip(best[1].service + width * np.linspace(-1.0, 1.0, TRIED), 0.0, None)
        best = min(best, *(at(service) for service in near.tolist()), key=lambda tried: tried[0])
    error, found = best
    gain = len(seen) * math.log(max(at(0.0)[0], 1e-12) / max(error, 1e-12))
    return found if found.service >= LEAST_SERVICE and gain > math.log(len(seen)) else constant
