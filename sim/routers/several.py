"""Several routers: each takes every n-th request, and knows only what it sent."""

from collections.abc import Sequence

from .router import ReplicaView, RequestView, Router

MOST = 1000


class Several(Router):
    """Routers in turn, each with its own memory, turns and view of the replicas."""

    def __init__(self, routers: Sequence[Router]) -> None:
        super().__init__(routers[0].prefixes)
        self._routers = routers
        self._turn = -1

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        self._turn = (self._turn + 1) % len(self._routers)
        return self._routers[self._turn].route(replicas, request)
