"""Read users' JSON or TOML with checks; errors name file, key and both values."""

import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from ..engine.errors import DsimError
from ..engine.plain import NATURAL, SIGNED, WORDS, Choice, Range, plain
from .read import cut, did_you_mean, shown

T = TypeVar("T")
Bounds = Range | Choice | None


class FileObject:
    """An object in a file, or a TOML table.

    keys: required; None: any. optional: others, with defaults. A number without a range is at least 0.
    """

    def __init__(
        self,
        path: str,
        name: str,
        value: object,
        keys: Iterable[str] | None = None,
        *,
        optional: Mapping[str, object] = MappingProxyType({}),
        error: type[DsimError] = DsimError,
    ) -> None:
        self.path, self.name, self._error = path, name, error
        if not isinstance(value, Mapping):
            raise error(f"{path}: {name or 'the file'} is {shown(value)}, expected an object")
        self.values: dict[str, Any] = {**optional, **value}
        expected = dict.fromkeys((*(keys or ()), *optional))
        if keys is None or expected.keys() == self.values.keys():
            return
        for key in value:
            if key not in expected:
                hint = did_you_mean(str(key), expected)
                raise error(f"{path}: {self._key(cut(key))} is unknown{hint}, expected keys {', '.join(expected)}")
        for key in expected:
            if key not in self.values:
                raise error(f"{path}: {self._key(key)} is missing, expected keys {', '.join(expected)}")

    def text(self, key: str, *choices: str) -> str:
        return cast(str, self._plain(key, self.values.get(key), str, Choice(choices) if choices else None))

    def integer(self, key: str, bounds: Range = NATURAL) -> int:
        return cast(int, self._plain(key, self.values.get(key), int, bounds))

    def number(self, key: str, bounds: Range = NATURAL) -> float:
        return cast(float, self._plain(key, self.values.get(key), float, bounds))

    def items(self, key: str) -> Sequence[Any]:
        return self._items(key, self.values.get(key))

    def section(self, key: str) -> "FileObject":
        return self._section(key, self.values.get(key))

    def sections(self, key: str) -> list["FileObject"]:
        return [self._section(f"{key}[{i}]", value) for i, value in enumerate(self.items(key))]

    def first(self, *keys: str) -> str:
        """The first key with a value, else the first."""
        return next((key for key in keys if self.values.get(key) is not None), keys[0])

    def get(self, key: str, hint: Any, bounds: Bounds = None) -> Any:
        """As a type: plain, a dataclass, or a list, tuple or dictionary of them."""
        return self._as(key, self.values.get(key), hint, bounds)

    def read(self, kind: type[T], **values: Any) -> T:
        """A dataclass, checked by types and declared Range or Choice. values: fields already read."""
        hints = _hints(cast(Any, kind))
        return kind(
            **{name: values[name] if name in values else self.get(name, hints[name]) for name in _keys(cast(Any, kind))}
        )

    def error(self, key: str, value: object, expected: str) -> DsimError:
        if value is None and key.partition("[")[0] not in self.values:
            return self._error(f"{self.path}: {self._key(key)} is missing, expected {expected}")
        return self._error(f"{self.path}: {self._key(key)} is {shown(value)}, expected {expected}")

    def _as(self, key: str, value: object, hint: Any, bounds: Bounds) -> Any:
        if hint in WORDS:
            return self._plain(key, value, hint, bounds)
        origin, arguments, declared = _shape(hint)
        if origin is Annotated:
            return self._as(key, value, arguments[0], declared or bounds)
        if origin in (UnionType, typing.Union):
            return self._as_any(key, value, arguments, bounds)
        if origin in (list, tuple):
            is_fixed = origin is tuple and arguments[-1] is not Ellipsis
            items = self._items(key, value, len(arguments) if is_fixed else None)
            kinds = arguments if is_fixed else [arguments[0]] * len(items)
            return origin(self._as(f"{key}[{i}]", item, kinds[i], bounds) for i, item in enumerate(items))
        if origin in (dict, Mapping):
            section = self._section(key, value)
            return {name: section._as(name, item, arguments[1], bounds) for name, item in section.values.items()}
        if is_dataclass(hint):
            return read_as(cast(Any, hint), self.path, self._key(key), value, self._error)
        return self._plain(key, value, hint, bounds)

    def _as_any(self, key: str, value: object, hints: tuple[Any, ...], bounds: Bounds) -> Any:
        """The first type that fits."""
        kinds = [hint for hint in hints if hint is not NoneType]
        if value is None and len(kinds) < len(hints):
            return None
        if len(kinds) == 1:
            return self._as(key, value, kinds[0], bounds)
        for kind in kinds:
            try:
                self._as(key, value, kind, bounds or SIGNED if kind in (int, float) else None)
            except DsimError:
                continue
            return value
        raise self.error(key, value, ", ".join(dict.fromkeys(WORDS.get(hint, "an object") for hint in hints)))

    def _plain(self, key: str, value: object, kind: Any, bounds: Bounds) -> Any:
        if kind is Any:
            return value
        if bounds is None and kind in (int, float):
            bounds = NATURAL
        try:
            return plain(value, kind, bounds)
        except ValueError as error:
            raise self.error(key, value, str(error)) from None

    def _items(self, key: str, value: object, length: int | None = None) -> Sequence[Any]:
        if not isinstance(value, list | tuple):
            raise self.error(key, value, "a list")
        if length is not None and len(value) != length:
            raise self._error(f"{self.path}: {self._key(key)} has {len(value)} values, expected {length}")
        return value

    def _section(self, key: str, value: object) -> "FileObject":
        return FileObject(self.path, self._key(key), value, error=self._error)

    def _key(self, key: str) -> str:
        return cut(f"{self.name}.{key}".lstrip("."))


def read_as(
    kind: type[T], path: str, name: str, value: object, error: type[DsimError] = DsimError, head: Iterable[str] = ()
) -> T:
    """A dataclass from a file's value, whose fields with a default may be absent. head: other keys, already read."""
    keys = _keys(cast(Any, kind))
    needed = [*head, *(key for key, default in keys.items() if default is MISSING)]
    optional = {key: default for key, default in keys.items() if default is not MISSING}
    return FileObject(path, name, value, needed, optional=optional, error=error).read(kind)


def stored(value: Any) -> Any:
    """As JSON types: NumPy's numbers as Python's, NaN and infinity null, a dataclass as `read_as` reads it.

    A field with metadata is derived, and left out.
    """
    if is_dataclass(value):
        return {f.name: stored(getattr(value, f.name)) for f in fields(value) if not f.metadata}
    if isinstance(value, Mapping):
        return {str(key): stored(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [stored(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def _keys(kind: Any) -> dict[str, Any]:
    """The keys of a dataclass's object, and their defaults or MISSING."""
    return {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(kind)
        if not f.metadata
    }


@cache
def _shape(hint: Any) -> tuple[Any, tuple[Any, ...], Bounds]:
    """Origin, arguments, and an Annotated type's Range or Choice."""
    declared = (extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Range | Choice))
    return get_origin(hint), get_args(hint), next(declared, None)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
