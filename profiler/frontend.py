"""The front end between clients and the engine: a fixed time, and a server that takes requests one by one.

The server (HTTP, tokenising, handing on) serves first come, first served, and takes the same time for every request, so
that its delay grows with the load. Both parts count on the way to the engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..engine.errors import DsimError

Floats = npt.NDArray[np.float64]

FEWEST = 20  # requests, to tell a server's time from a fixed one
LEAST_SERVICE = 1e-4  # s: less is within a clock's noise
TRIED = 200  # service times, evenly spread


@dataclass(frozen=True)
class FrontEnd:
    """The time between a client and the engine."""

    fixed: float = 0.0  # s, both ways
    service: float = 0.0  # s of the one server, a request

    def __post_init__(self) -> None:
        for name in ("fixed", "service"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                shown = "frontend" if name == "fixed" else "frontend_service"
                raise DsimError(f"{shown} is {value} s, expected at least 0 and finite")

    def reach(self, arrival: Floats) -> Floats:
        """When requests reach the engine.

        arrival: s, in the order of sending.
        """
        if not self.service:
            return arrival + self.fixed
        turn = self.service * np.arange(len(arrival))
        served: Floats = np.maximum.accumulate(arrival - turn) + (turn + self.service)
        return served + self.fixed


NO_FRONT_END = FrontEnd()


class Queue:
    """The queue of a front end while a run lasts; requests join it in the order of sending."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front
        self._free = -math.inf

    def reach(self, arrival: float) -> float:
        """When a request that is sent now reaches the engine."""
        front = self._front
        if not front.service:
            return arrival + front.fixed
        self._free = max(arrival, self._free) + front.service
        return self._free + front.fixed


def fit_front_end(sent: Floats, outside: Sequence[float] | Floats) -> FrontEnd:
    """The front end that explains times outside the engine.

    sent: s, each request's time at its client. outside: s between client and engine, NaN if unknown. The service time
    minimises the mean absolute residual, and the fixed part is the median of what is left. The service time is 0 unless
    the likelihood of the residuals (Laplace) gains more by it than the logarithm of their number.
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

    most = float(np.percentile(seen, 95))  # every request takes the whole service time
    best = min((at(service) for service in np.linspace(0.0, most, TRIED).tolist()), key=lambda tried: tried[0])
    for width in (most / TRIED, most / TRIED**2):  # twice finer around the best
        near = np.clip(best[1].service + width * np.linspace(-1.0, 1.0, TRIED), 0.0, None)
        best = min(best, *(at(service) for service in near.tolist()), key=lambda tried: tried[0])
    error, found = best
    gain = len(seen) * math.log(max(at(0.0)[0], 1e-12) / max(error, 1e-12))
    return found if found.service >= LEAST_SERVICE and gain > math.log(len(seen)) else constant
