"""A decider: it chooses which requests are prefilled in a pool of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..routers.router import ReplicaView, RequestView


class DecodeView(ReplicaView, Protocol):
    """A replica that decodes, as a decider sees it."""

    def found(self, request: RequestView) -> int:
        """Tokens that a request's prompt begins with and that the replica's prefix cache has; 0 without a cache."""


@dataclass(frozen=True)
class Decider:
    """Chooses, as a request arrives, whether a prefill pool or the decoding replica prefills it."""

    def splits(self, request: RequestView, prefill: Sequence[ReplicaView], decode: Sequence[DecodeView]) -> bool:
        """Whether the request goes to the prefill pools.

        prefill: their replicas. decode: the replicas of the other pools.
        """
        raise NotImplementedError
