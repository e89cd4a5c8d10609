"""Sangam's router: `--router ./examples/routers/free_pages.py:FreePages`."""

from collections.abc import Sequence

from dsim.fleet import ReplicaView, RequestView, Router


class FreePages(Router):
    """The replica with the most free KV pages; the first of equals."""

    def where_prefilled(self) -> Router:
        return FewestTokens(self.prefixes)

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        free = [replica.num_pages - replica.pages_held for replica in replicas]
        return free.index(max(free))


class FewestTokens(Router):
    """In a prefill pool: the replica with the fewest tokens to prefill."""

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        tokens = [replica.expected_tokens for replica in replicas]
        return tokens.index(min(tokens))
