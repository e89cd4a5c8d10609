"""Join the shortest queue: the replica with the fewest requests."""

from collections.abc import Sequence

import numpy as np

from .router import ReplicaView, RequestView, Router, figures


class ShortestQueue(Router):
    """The replica with the fewest requests, waiting or running; the first of equals."""

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        return int(np.argmin(np.add(figures(replicas, "num_waiting"), figures(replicas, "num_running"))))
