"""Round robin: replicas take requests in turn."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...engine.prefix import Prefixes
from .router import ReplicaView, RequestView, Router


class RoundRobin(Router):
    takes_turns = True

    def __init__(self, prefixes: Prefixes | None = None) -> None:
        super().__init__(prefixes)
        self._turn = -1

    def in_advance(self, num_requests: int, num_replicas: int) -> npt.NDArray[np.int64]:
        return np.arange(num_requests) % num_replicas

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        self._turn = (self._turn + 1) % len(replicas)
        return self._turn
