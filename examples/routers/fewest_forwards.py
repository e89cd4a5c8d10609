"""The fewest forwards to come, by blocks to decode: `--router ./examples/routers/fewest_forwards.py:QueuedForwards`."""

from collections.abc import Sequence

from dsim.fleet import ReplicaView, RequestView, Router


class QueuedForwards(Router):
    """The fewest tokens to decode; the first of equals.

    A block takes the same forwards wherever it is decoded; a queued prompt's few prefill forwards do not count.
    """

    def route(self, replicas: Sequence[ReplicaView], request: RequestView) -> int:
        tokens = [replica.expected_tokens - replica.queued_prompt_tokens for replica in replicas]
        return tokens.index(min(tokens))
