"""Stale views: a router's figures are refreshed at intervals, as scraped metrics are."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .router import FIGURES, ReplicaView, RequestView, Router


class Stale(Router):
    """Sees each replica as up to `delay` seconds ago."""

    def __init__(self, router: Router, delay: float) -> None:
        super().__init__(router.prefixes)
        self._router, self._delay = router, delay
        self._refreshed = -float("inf")  # s
        self._seen: dict[int, Any] = {}

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        if request.arrival >= self._refreshed + self._delay:
            self._refreshed = request.arrival
            self._seen = {}
        views = [self._seen.get(replica.replica) or self._look(replica) for replica in replicas]
        return self._router.route(views, request)

    def _look(self, replica: ReplicaView) -> Any:
        view = SimpleNamespace(**{name: getattr(replica, name) for name in FIGURES})
        return self._seen.setdefault(replica.replica, view)
