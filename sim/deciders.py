"""Deciders choose which requests are prefilled in their own pool: shipped, or of a user's file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..engine.allowed_code import NO_CODE, AllowedCode
from ..engine.errors import PolicyError
from .by_name import new_part
from .routers.router import ReplicaView, RequestView


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


@dataclass(frozen=True)
class Uncached(Decider):
    """Prompts with at least `tokens` tokens in no decoding replica's prefix cache.

    As in llm-d's decider and BLIS's threshold (fleet.md 2.3). There the decoding replica is chosen first; here the one
    with the longest part of the prompt counts.
    """

    tokens: int = 512

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise PolicyError(f"tokens is {self.tokens}, expected at least 0")

    def splits(self, request: RequestView, prefill: Sequence[ReplicaView], decode: Sequence[DecodeView]) -> bool:
        cached = max((replica.found(request) for replica in decode), default=0)
        return request.input_length - cached >= self.tokens


DECIDERS: dict[str, type[Decider]] = {"always": Always, "never": Never, "uncached": Uncached}


@dataclass(frozen=True)
class Deciding:
    spec: str
    decider: Decider

    @property
    def is_shipped(self) -> bool:
        return type(self.decider) in DECIDERS.values()


def deciding(spec: str, allow_code: AllowedCode = NO_CODE) -> Deciding:
    """The decider of a SPEC; errors as in by_name.new_part."""
    return Deciding(spec, new_part("decider", spec, DECIDERS, Decider, allow_code))
