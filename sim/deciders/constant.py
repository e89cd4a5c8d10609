"""Always or never: every request, or none, goes to a prefill pool."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..routers.router import ReplicaView, RequestView
from .decider import Decider, DecodeView


@dataclass(frozen=True)
class Always(Decider):
    """A prefill pool prefills every prompt of at least a block."""

    def splits(self, request: RequestView, prefill: Sequence[ReplicaView], decode: Sequence[DecodeView]) -> bool:
        return True


@dataclass(frozen=True)
class Never(Decider):
    """The decoding replica prefills every prompt."""

    def splits(self, request: RequestView, prefill: Sequence[ReplicaView], decode: Sequence[DecodeView]) -> bool:
        return False
