"""A decider: it chooses which requests are prefilled in a pool of their own."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..routers.router import ReplicaView, RequestView


@dataclass(frozen=True)
class Decider:
    """Chooses, as a request arrives, whether a prefill pool or the decoding replica prefills it."""

    def splits(self, request: RequestView, prefill: Sequence[ReplicaView], decode: Sequence[ReplicaView]) -> bool:
        """Whether the request goes to the prefill pools.

        prefill: their replicas. decode: the replicas of the other pools.
        """
        raise NotImplementedError
