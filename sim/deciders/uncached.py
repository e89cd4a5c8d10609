"""Uncached: long prompts go to a prefill pool, as llm-d's prefix-based decider and BLIS's threshold do.

Source: fleet.md 2.3. Decoding replicas of a split fleet share no prefixes, so all of a prompt counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.errors import PolicyError
from ..routers.router import ReplicaView, RequestView
from .decider import Decider


@dataclass(frozen=True)
class Uncached(Decider):
    """Prompts with at least `tokens` tokens that a decoding replica has no keys and values of."""

    tokens: int = 512

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise PolicyError(f"tokens is {self.tokens}, expected at least 0")

    def splits(self, request: RequestView, prefill: Sequence[ReplicaView], decode: Sequence[ReplicaView]) -> bool:
        return request.input_length >= self.tokens
