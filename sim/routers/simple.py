"""Routers that look at one figure of each replica, or at none."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...engine import chance
from ...engine.prefix import Prefixes
from ...traces.trace import Ints
from .router import ReplicaView, RequestView, Router


class LeastTokens(Router):
    """The fewest tokens to prefill or expected to be returned; the first of equals."""

    least = ("expected_tokens",)


class ShortestQueue(Router):
    """The fewest requests, waiting or running; the first of equals."""

    least = ("num_waiting", "num_running")


class RoundRobin(Router):
    """Replicas take requests in turn."""

    takes_turns = True

    def __init__(self, prefixes: Prefixes | None = None) -> None:
        super().__init__(prefixes)
        self._turn = -1

    def in_advance(self, num_requests: int, num_replicas: int) -> Ints:
        return np.arange(num_requests) % num_replicas

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        self._turn = (self._turn + 1) % len(replicas)
        return self._turn


class Random(Router):
    """Draws a replica from the run's seed and the request, whatever the load."""

    def in_advance(self, num_requests: int, num_replicas: int) -> Ints:
        return self._drawn(np.arange(num_requests), num_replicas)

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        return int(self._drawn(request.index, len(replicas))[0])

    def _drawn(self, requests: npt.ArrayLike, num_replicas: int) -> Ints:
        uniform = chance.uniform(chance.key(self.seed, chance.ROUTE, int(self.prefills), requests))
        return (uniform * num_replicas).astype(np.int64)
