"""Whether plain values, read from JSON, have the shape that a type says: an error names the place and both sides."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from ..engine.errors import DsimError
from ..engine.plain import plain
from .read import shown


def check_shape(value: object, hint: Any, where: str) -> None:
    """DsimError unless the value is of the type: a number, text, list, dict, TypedDict or dataclass, or null.

    A dataclass's fields must be there unless they have a default, a TypedDict's need not; other keys are free. A float
    may be null, which is how JSON says NaN.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return
    if origin in (types.UnionType, typing.Union):
        _check_any(value, arguments, where)
    elif origin in (list, tuple):
        if not isinstance(value, list):
            raise DsimError(f"{where} is {shown(value)}, expected a list")
        for i, item in enumerate(value):
            check_shape(item, arguments[0], f"{where}[{i}]")
    elif origin in (dict, Mapping):
        for key, item in _object(value, where).items():
            check_shape(item, arguments[1], f"{where}.{shown(key)[1:-1]}")
    elif typing.is_typeddict(hint) or dataclasses.is_dataclass(hint):
        found = _object(value, where)
        for key in _needed(hint):
            if key not in found:
                raise DsimError(f"{where}.{key} is missing, expected {', '.join(_needed(hint))}")
        for key, kind in typing.get_type_hints(hint).items():
            if key in found:
                check_shape(found[key], kind, f"{where}.{key}")
    else:
        _check_plain(value, hint, where)


def _needed(hint: Any) -> list[str]:
    if not dataclasses.is_dataclass(hint):
        return []
    return [f.name for f in dataclasses.fields(hint) if f.default is dataclasses.MISSING]


def _check_plain(value: object, hint: Any, where: str) -> None:
    if value is None and hint in (float, types.NoneType):
        return
    try:
        if hint is types.NoneType:
            raise ValueError("null")
        plain(value, hint)
    except ValueError as error:
        raise DsimError(f"{where} is {shown(value)}, expected {error}") from None


def _check_any(value: object, hints: tuple[Any, ...], where: str) -> None:
    for i, hint in enumerate(hints):
        try:
            check_shape(value, hint, where)
            return
        except DsimError:
            if i == len(hints) - 1:
                raise


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DsimError(f"{where} is {shown(value)}, expected an object")
    return value
