"""Least tokens: the replica with the least work left."""

from collections.abc import Sequence

from .router import ReplicaView, RequestView, Router


class LeastTokens(Router):
    """The replica with the fewest tokens to prefill or expected to be returned; the first of equals."""

    goes_by_length = True

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        return min(range(len(replicas)), key=lambda i: replicas[i].expected_tokens)
