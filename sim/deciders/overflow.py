"""Overflow: while all prefill replicas are busy, the decoding replica prefills (Sangam's hybrid mode, fleet.md 2.4)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.errors import PolicyError
from ..routers.router import ReplicaView, RequestView
from .decider import Decider, DecodeView


@dataclass(frozen=True)
class Overflow(Decider):
    """All prompts, unless every prefill replica has `tokens` or more to prefill."""

    tokens: int = 16384

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise PolicyError(f"tokens is {self.tokens}, expected at least 1")

    def splits(self, request: RequestView, prefill: Sequence[ReplicaView], decode: Sequence[DecodeView]) -> bool:
        return any(replica.expected_tokens < self.tokens for replica in prefill)
