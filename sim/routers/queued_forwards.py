"""Queued forwards: the replica with the fewest forwards still needed, by the blocks left to decode."""

from collections.abc import Sequence

from .router import ReplicaView, RequestView, Router


class QueuedForwards(Router):
    """The replica with the fewest tokens left to decode, the first of equals.

    An answer takes its blocks times the forwards of a block, and a block takes the same number wherever it is decoded.
    A prompt in the queue counts nothing, however long: its prefill is one forward, or a few.
    """

    goes_by_length = True

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        left = [replica.expected_tokens - replica.queued_prompt_tokens for replica in replicas]
        return left.index(min(left))
