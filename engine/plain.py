"""A plain value, from JSON, TOML or a command line, as one of the types that files and fields hold."""

from typing import Any

WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
MOST = {int: 2**63 - 1, float: 1e300}  # beyond it a whole number fits no array, and a sum no float


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
