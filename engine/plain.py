"""A plain value, from JSON, TOML or a command line, as one of the types that files and fields hold, and its range."""

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any

WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
MOST = {int: 2**63 - 1, float: 1e300}  # beyond it a whole number fits no array, and a sum no float


@dataclass(frozen=True)
class Range:
    """Bounds of a number; None: no bound."""

    low: float | None = None
    high: float | None = None
    above: bool = False  # `low` itself is outside

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, Real) or not math.isfinite(value):
            return False
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return False
        return self.high is None or bool(value <= self.high)

    def __str__(self) -> str:
        if self.above:
            return f"more than {self.low:g}" + ("" if self.high is None else f" and at most {self.high:g}")
        if self.high is None:
            return f"at least {self.low}"
        return f"{self.low} to {self.high}" if self.low is not None else f"at most {self.high}"

    @property
    def wanted(self) -> str:
        """What an error expects."""
        return str(self)


@dataclass(frozen=True)
class Choice:
    """The words that a field may be."""

    words: tuple[str, ...]

    def __contains__(self, value: object) -> bool:
        return value in self.words

    def __str__(self) -> str:
        return ", ".join(self.words)

    @property
    def wanted(self) -> str:
        """What an error expects."""
        return f"one of {self}"


@cache
def bounds_of(kind: type) -> Mapping[str, tuple[Range | Choice, bool]]:
    """The declared Range or Choice of each field of a dataclass, and whether the field may be None."""
    found = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, Range | Choice):
                found[name] = extra, types.NoneType in typing.get_args(typing.get_args(hint)[0])
    return found


def plain(value: object, kind: Any, least: float | None = None, most: float | None = None) -> Any:
    """The value as a text, a whole number, a number, or true or false; ValueError with the words for what is expected.

    True is no number, and a whole number is one that others call a number, too.
    """
    held = (int, float) if kind is float else kind
    if not isinstance(value, held) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(WORDS[kind])
    if kind not in MOST:
        return value
    number: Any = value
    if kind is float and not abs(number) < MOST[float]:
        raise ValueError("a finite number")
    if least is not None and number < least:
        raise ValueError(f"at least {least:g}" if kind is float else f"at least {least}")
    top = MOST[kind] if most is None else most
    if number > top or number < -MOST[kind]:
        raise ValueError(f"at most {top:g}" if kind is float else f"at most {top}")
    return float(number) if kind is float else number
