"""Plain values of JSON, TOML or command lines as typed fields, and their ranges."""

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Annotated, Any

WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    types.NoneType: "null",
}
FIELD_WORDS = WORDS | {str: "a word"}
MOST = {int: 2**63 - 1, float: 1e300}  # more fits no array, or overflows float sums


@dataclass(frozen=True)
class Range:
    """Bounds of a number; None: no bound."""

    low: float | None = None
    high: float | None = None
    above: bool = False  # excludes `low`

    def __contains__(self, value: object) -> bool:
        number: Any = value
        if not isinstance(value, Real) or not -math.inf < number < math.inf:  # nor NaN
            return False
        if self.low is not None and (number < self.low or (self.above and number == self.low)):
            return False
        return self.high is None or bool(number <= self.high)

    def __str__(self) -> str:
        if self.low is None and self.high is None:
            return "any number"
        if self.above and self.high is None:
            return f"more than {self.low:g}"
        if self.above:
            return f"more than {self.low:g} and at most {self.high:g}"
        if self.high is None:
            return f"at least {self.low}"
        return f"{self.low} to {self.high}"

    @property
    def wanted(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Choice:
    """Words that a field may be."""

    words: tuple[str, ...]

    def __contains__(self, value: object) -> bool:
        return value in self.words

    def __str__(self) -> str:
        return ", ".join(self.words)

    @property
    def wanted(self) -> str:
        return f"one of {self}"


NATURAL, SIGNED = Range(0), Range()
Positive = Annotated[int, Range(1)]
Share = Annotated[float, Range(0, 1)]
Signed = Annotated[float, SIGNED]


@cache
def bounds_of(kind: type) -> Mapping[str, tuple[Range | Choice, bool]]:
    """Each field's Range or Choice, and whether it may be None."""
    bounds = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, Range | Choice):
                bounds[name] = extra, types.NoneType in typing.get_args(typing.get_args(hint)[0])
    return bounds


def words_of(kind: Any) -> str:
    """The kind of a policy's field, in words."""
    if typing.get_origin(kind) is tuple:
        return {int: "whole numbers such as 2/8/32", float: "numbers such as 0.6/0.4"}[typing.get_args(kind)[0]]
    return FIELD_WORDS.get(kind, "a number or none")


def plain(value: object, kind: Any, bounds: Range | Choice | None = None) -> Any:
    """The value as `kind`; ValueError says what is expected.

    A bool is no number; a whole number is also a float.
    """
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(WORDS[kind])
    number: Any = value
    if kind is float and not abs(number) < MOST[float]:
        raise ValueError("a finite number")
    if bounds is not None and value not in bounds:
        raise ValueError(bounds.wanted)
    if kind is int and abs(number) > MOST[int]:
        raise ValueError(f"at most {MOST[int]}")
    return float(number) if kind is float else value
