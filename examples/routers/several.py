"""Several routers in turn: `--router ./examples/routers/several.py:Several,router=prefix,routers=4`."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from dsim.fleet import PolicyError, ReplicaView, RequestView, Router, routing


class Several(Router):
    """Shipped routers that take requests in turn; each knows only what it sent."""

    goes_by_prefix = True
    settings = {"router": str, "routers": int}  # noqa: RUF012

    def __init__(self, prefixes: Any = None, router: str = "jsq", routers: int = 2) -> None:
        super().__init__(prefixes)
        if routers < 1:
            raise PolicyError(f"routers is {routers}, expected at least 1")
        self._routing, self._count, self._turn = routing(router), routers, -1

    @cached_property
    def _routers(self) -> list[Router]:
        return [self._routing.new(self.prefixes, seed=self.seed) for _ in range(self._count)]

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        self._turn = (self._turn + 1) % self._count
        return self._routers[self._turn].route(replicas, request)
