"""Uncached: long prompts go to a prefill pool, as in llm-d's decider and BLIS's threshold (fleet.md 2.3).

There the decoding replica is chosen first; here the one with most of the prompt counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.errors import PolicyError
from ..routers.router import ReplicaView, RequestView
from .decider import Decider, DecodeView


@dataclass(frozen=True)
class Uncached(Decider):
    """Prompts with at least `tokens` tokens in no decoding replica's prefix cache."""

    tokens: int = 512

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise PolicyError(f"tokens is {self.tokens}, expected at least 0")

    def splits(self, request: RequestView, prefill: Sequence[ReplicaView], decode: Sequence[DecodeView]) -> bool:
        found = max((replica.found(request) for replica in decode), default=0)
        return request.input_length - found >= self.tokens
