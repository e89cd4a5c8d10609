"""Queued forwards: the fewest forwards still needed, by blocks left to decode."""

from collections.abc import Sequence

from .router import ReplicaView, RequestView, Router


class QueuedForwards(Router):
    """The fewest tokens left to decode; the first of equals.

    A block takes the same forwards wherever it is decoded; a queued prompt's few prefill forwards do not count.
    """

    goes_by_length = True

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        left = [replica.expected_tokens - replica.queued_prompt_tokens for replica in replicas]
        return left.index(min(left))
