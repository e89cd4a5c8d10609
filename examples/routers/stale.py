"""A router of old figures: `--router ./examples/routers/stale.py:Stale,router=jsq,delay=0.05`.

Real routers scrape the metrics of replicas at intervals.
"""

from collections.abc import Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from dsim.fleet import PolicyError, ReplicaView, RequestView, Router, routing

FIGURES = (
    "replica", "num_waiting", "num_running", "expected_tokens", "queued_prompt_tokens", "pages_held", "num_pages",
    "page_size",
)  # fmt: skip


class Stale(Router):
    """A shipped router that sees each replica as up to `delay` seconds ago."""

    goes_by_prefix = True
    settings = {"router": str, "delay": float}  # noqa: RUF012

    def __init__(self, prefixes: Any = None, router: str = "jsq", delay: float = 0.05) -> None:
        super().__init__(prefixes)
        if not 0 <= delay < float("inf"):
            raise PolicyError(f"delay is {delay} s, expected at least 0 and finite")
        self._routing, self._delay = routing(router), delay
        self._refreshed = -float("inf")  # s
        self._seen: dict[int, Any] = {}

    @cached_property
    def _router(self) -> Router:
        return self._routing.new(self.prefixes, seed=self.seed)

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        if request.arrival >= self._refreshed + self._delay:
            self._refreshed = request.arrival
            self._seen = {}
        views = [self._seen.get(replica.replica) or self._look(replica) for replica in replicas]
        return self._router.route(views, request)

    def _look(self, replica: ReplicaView) -> Any:
        view = SimpleNamespace(**{name: getattr(replica, name) for name in FIGURES})
        return self._seen.setdefault(replica.replica, view)
