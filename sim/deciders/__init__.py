"""Deciders by name: shipped, or of a user's file."""

from dataclasses import dataclass

from ...engine.allowed_code import NO_CODE, AllowedCode
from ..by_name import made
from .constant import Always, Never
from .decider import Decider
from .uncached import Uncached

DECIDERS: dict[str, type[Decider]] = {"always": Always, "never": Never, "uncached": Uncached}


@dataclass(frozen=True)
class Deciding:
    spec: str
    decider: Decider

    @property
    def is_shipped(self) -> bool:
        return type(self.decider) in DECIDERS.values()


def deciding(spec: str, allow_code: AllowedCode = NO_CODE) -> Deciding:
    """The decider of a SPEC; errors as in by_name.made."""
    return Deciding(spec, made("decider", spec, DECIDERS, Decider, allow_code))
