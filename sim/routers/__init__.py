"""Routers by name: shipped, or of a user's file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...engine.allowed_code import NO_CODE, AllowedCode
from ...engine.errors import PolicyError, quoted
from ...engine.outside import running_code_of
from ...engine.prefix import Prefixes
from ..by_name import kind_of, values
from .longest_prefix import LongestPrefix
from .router import FIGURES, ReplicaView, RequestView, Restricted, Router, restricted
from .simple import LeastTokens, Random, RoundRobin, ShortestQueue

ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "random": Random,
    "least-tokens": LeastTokens,
    "jsq": ShortestQueue,
    "prefix": LongestPrefix,
}


@dataclass(frozen=True)
class Routing:
    """A router by its SPEC; each run makes an instance."""

    name: str
    kind: type[Router]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_shipped(self) -> bool:
        return self.kind in ROUTERS.values()

    def new(self, prefixes: Prefixes | None = None, prefills: bool = False, seed: int = 0) -> Router:
        """A router for one run of this seed. prefills: it chooses where to prefill."""
        with running_code_of(f"router {self.name}"):
            router = self.kind(prefixes, **self.settings)
            router.seed, router.prefills = seed, prefills
            if self.is_shipped:
                return router
            return _Checked(self.name, router)


def routing(spec: str, allow_code: AllowedCode = NO_CODE) -> Routing:
    """The router of a SPEC; errors as in by_name.new_part."""
    kind, items, asker = kind_of("router", spec, ROUTERS, Router, allow_code)
    routing = Routing(spec, kind, values(items, kind.settings, asker))
    if routing.settings:
        routing.new()  # checks the fields
    return routing


class _Checked(Router):
    """Shows an outside router views alone, and checks its answer."""

    def __init__(self, name: str, router: Router) -> None:
        super().__init__(router.prefixes)
        self._name = name
        self._router = router
        self._views: dict[int, Any] = {}  # by replica

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        views = [
            self._views.setdefault(replica.replica, Restricted(replica, "replica", FIGURES)) for replica in replicas
        ]
        with running_code_of(f"router {self._name}, asked for request {request.index}"):
            chosen = self._router.route(views, restricted(request))
        if not isinstance(chosen, int | np.integer) or isinstance(chosen, bool) or not 0 <= chosen < len(views):
            raise PolicyError(
                f"router {self._name} returned {quoted(chosen)} for request {request.index}, expected a whole number "
                f"from 0 to {len(views) - 1}"
            )
        return int(chosen)
