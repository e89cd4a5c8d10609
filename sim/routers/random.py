"""Random: each request goes to a replica that keyed chance draws."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...engine import chance
from .router import ReplicaView, RequestView, Router


class Random(Router):
    """Draws a replica from the run's seed and the request, whatever the load."""

    stage = 0  # 1: chooses where to prefill, by other draws

    def where_prefilled(self) -> Router:
        router = Random(self.prefixes)
        router.stage = 1
        return router

    def in_advance(self, num_requests: int, num_replicas: int) -> npt.NDArray[np.int64]:
        return self._drawn(np.arange(num_requests), num_replicas)

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        return int(self._drawn(request.index, len(replicas))[0])

    def _drawn(self, requests: npt.ArrayLike, num_replicas: int) -> npt.NDArray[np.int64]:
        uniform = chance.uniform(chance.key(self.seed, chance.ROUTE, self.stage, requests))
        return (uniform * num_replicas).astype(np.int64)
