"""A router: the replica with the most free KV pages, and among equals the shortest queue."""

from collections.abc import Sequence

from dsim.fleet import ReplicaView, RequestView, Router


class MostFreePages(Router):
    """Sends each request where the KV pool has the largest free share."""

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        def load(i: int) -> tuple[float, int]:
            replica = replicas[i]
            return replica.pages_held / replica.num_pages, replica.num_waiting + replica.num_running

        return min(range(len(replicas)), key=load)


ROUTER = MostFreePages
