"""Join the shortest queue: the replica with the fewest requests."""

from collections.abc import Sequence

from .router import ReplicaView, RequestView, Router


class ShortestQueue(Router):
    """The replica with the fewest requests, waiting or running; the first of equals."""

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        return min(range(len(replicas)), key=lambda i: replicas[i].num_waiting + replicas[i].num_running)
