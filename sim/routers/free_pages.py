"""Free pages: the replica with the most decodes, the one with the fewest tokens prefills (Sangam, fleet.md 2.4)."""

from collections.abc import Sequence

import numpy as np

from .least_tokens import LeastTokens
from .router import ReplicaView, RequestView, Router, figures


class FreePages(Router):
    """The replica with the most free KV pages; the first of equals."""

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        free = np.subtract(figures(replicas, "num_pages"), figures(replicas, "pages_held"))
        return int(np.argmax(free))

    def where_prefilled(self) -> Router:
        return LeastTokens(self.prefixes)
