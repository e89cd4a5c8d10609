"""A decider: long prompts go to the prefill pool, unless its queue is longer than those of the decoding replicas."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsim.fleet import Decider, ReplicaView, RequestView


@dataclass(frozen=True)
class LongAndShort(Decider):
    """Long prompts to the shorter queues."""

    tokens: int = 1000

    def splits(self, request: RequestView, prefill: Sequence[ReplicaView], decode: Sequence[ReplicaView]) -> bool:
        def shortest(replicas: Sequence[ReplicaView]) -> int:
            return min(replica.num_waiting for replica in replicas)

        return request.input_length >= self.tokens and shortest(prefill) <= shortest(decode)


DECIDER = LongAndShort
