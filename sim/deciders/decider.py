"""A decider chooses which requests are prefilled in their own pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..routers.router import ReplicaView, RequestView


class DecodeView(ReplicaView, Protocol):
    """A decoding replica, as a decider sees it."""

    def found(self, request: RequestView) -> int:
        """First tokens of a prompt in the replica's prefix cache; 0 without one."""


@dataclass(frozen=True)
class Decider:
    """Chooses, as a request arrives, whether a prefill pool or the decoding replica prefills it."""

    def splits(self, request: RequestView, prefill: Sequence[ReplicaView], decode: Sequence[DecodeView]) -> bool:
        """Whether the request goes to the prefill pools.

        prefill: their replicas; decode: those of the other pools.
        """
        raise NotImplementedError("it has no method splits")
