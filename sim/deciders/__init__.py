"""Deciders by name: the shipped ones, and deciders in a user's file."""

from dataclasses import dataclass

from ...engine.allowed_code import NO_CODE, AllowedCode
from ..by_name import made
from .constant import Always, Never
from .decider import Decider
from .overflow import Overflow
from .uncached import Uncached

DECIDERS: dict[str, type[Decider]] = {"always": Always, "never": Never, "uncached": Uncached, "overflow": Overflow}


@dataclass(frozen=True)
class Deciding:
    """A decider by its SPEC."""

    spec: str
    decider: Decider

    @property
    def is_shipped(self) -> bool:
        """Whether it is one of this package's."""
        return type(self.decider) in DECIDERS.values()


def deciding(spec: str, allow_code: AllowedCode = NO_CODE) -> Deciding:
    """The decider of a SPEC, `name[,field=value...]` or `path/to/file.py:NAME[,field=value...]`.

    Raises PolicyError for an unknown name, field or value, and CodeError for a file that is not in `allow_code`.
    """
    return Deciding(spec, made("decider", spec, DECIDERS, Decider, allow_code))
