"""Read JSON whose every value is checked where it enters: an error names the file, the key and both values."""

import json
import math
import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

from ..engine.errors import ProfileError
from ..engine.plain import plain
from ..files import read
from ..files.read import cut, shown

T = TypeVar("T")
Limit = tuple[Any, ...]  # the least of a number, and the most; or the words that a text may be
AllLimits = Mapping[type, Mapping[str, Limit]]  # by dataclass and field


class Section:
    """An object of a JSON file that must hold exactly `keys`."""

    def __init__(self, path: str, name: str, value: object, keys: tuple[str, ...]) -> None:
        self.path, self.name = path, name
        if not isinstance(value, dict):
            raise ProfileError(f"{path}: {name or 'the file'} is {shown(value)}, expected an object")
        self.values: dict[str, Any] = value
        for key in keys:
            if key not in value:
                raise ProfileError(f"{path}: {self._key(key)} is missing, expected keys {', '.join(keys)}")
        for key in value:
            if key not in keys:
                raise ProfileError(f"{path}: {self._key(cut(key))} is unknown, expected keys {', '.join(keys)}")

    def text(self, key: str, *choices: str) -> str:
        value: str = self._plain(key, self.values[key], str)
        if choices and value not in choices:
            raise self.error(key, value, "one of " + ", ".join(choices))
        return value

    def flag(self, key: str) -> bool:
        return bool(self._plain(key, self.values[key], bool))

    def integer(self, key: str, least: int = 0, most: int | None = None) -> int:
        return int(self._plain(key, self.values[key], int, least, most))

    def number(self, key: str, least: float = 0.0, most: float = math.inf) -> float:
        return float(self._plain(key, self.values[key], float, least, most))

    def numbers(self, key: str, least: float = 0.0, most: float = math.inf, length: int | None = None) -> list[float]:
        values = self.items(key, length)
        return [self._plain(f"{key}[{i}]", value, float, least, most) for i, value in enumerate(values)]

    def texts(self, key: str, *choices: str, length: int | None = None) -> list[str]:
        values = self.items(key, length)
        parts = self.part({f"{key}[{i}]": value for i, value in enumerate(values)})
        return [parts.text(k, *choices) for k in parts.values]

    def items(self, key: str, length: int | None = None) -> list[object]:
        value = self.values[key]
        if not isinstance(value, list):
            raise self.error(key, value, "a list")
        if length is not None and len(value) != length:
            raise ProfileError(f"{self.path}: {self._key(key)} has {len(value)} values, expected {length}")
        return value

    def section(self, key: str, keys: tuple[str, ...]) -> "Section":
        return Section(self.path, self._key(key), self.values[key], keys)

    def sections(self, key: str, keys: tuple[str, ...]) -> list["Section"]:
        values = self.items(key)
        return [Section(self.path, f"{self._key(key)}[{i}]", value, keys) for i, value in enumerate(values)]

    def free(self, key: str) -> "Section":
        """The object under `key`, whatever its keys are."""
        given = self.values[key]
        return self.section(key, tuple(given) if isinstance(given, dict) else ())

    def all_numbers(self) -> dict[str, float]:
        """Every value, each a number and at least 0."""
        return {key: self.number(key) for key in self.values}

    def all_plain(self) -> dict[str, str | int | float | bool | None]:
        """Every value, each a text, a number, true, false or null."""
        for key, value in self.values.items():
            if not isinstance(value, str | int | float | bool | None):
                raise self.error(key, value, "a text, a number, true, false or null")
        return dict(self.values)

    def part(self, values: dict[str, object]) -> "Section":
        """A section of other values under the same name: the elements of a list, say."""
        return Section(self.path, self.name, values, tuple(values))

    def read(self, kind: type[T], limits: "AllLimits", **known: Any) -> T:
        """An object of a dataclass, each field checked by its type and by `limits` of its class and name.

        Numbers are at least 0 where no limits are. `known`: fields that are worked out already. Fields that are
        dataclasses, lists of them, and lists are read alike.
        """
        own, hints = limits.get(kind, {}), _hints(cast(Any, kind))
        found = {
            name: known[name] if name in known else self._field(name, hint, own.get(name, ()), limits)
            for name, hint in hints.items()
        }
        return kind(**found)

    def _field(self, key: str, hint: Any, limit: "Limit", limits: "AllLimits") -> Any:
        """A value of one of the types that files hold."""
        if isinstance(hint, types.UnionType) and types.NoneType in get_args(hint):
            if self.is_null(key):
                return None
            [hint] = (arm for arm in get_args(hint) if arm is not types.NoneType)
        if hint in self._READ:
            return self._READ[hint](self, key, *limit)
        if isinstance(hint, type) and is_dataclass(hint):
            return self.section(key, names(hint)).read(cast(type[Any], hint), limits)
        if get_origin(hint) is dict:
            part = self.free(key)
            return part.all_numbers() if get_args(hint)[1] is float else part.all_plain()
        [item, _] = get_args(hint)  # a tuple of any length
        if isinstance(item, type) and is_dataclass(item):
            return tuple(part.read(cast(type[Any], item), limits) for part in self.sections(key, names(item)))
        return tuple(self.texts(key, *limit) if item is str else self.numbers(key, *limit))

    def is_null(self, key: str) -> bool:
        return self.values[key] is None

    def error(self, key: str, value: object, expected: str) -> ProfileError:
        return ProfileError(f"{self.path}: {self._key(key)} is {shown(value)}, expected {expected}")

    _READ: ClassVar[dict[Any, Any]] = {str: text, bool: flag, int: integer, float: number}

    def _plain(self, key: str, value: object, kind: type, *limit: float | None) -> Any:
        try:
            return plain(value, kind, *limit)
        except ValueError as error:
            raise self.error(key, value, str(error)) from None

    def _key(self, key: str) -> str:
        return cut(f"{self.name}.{key}" if self.name else key)


def names(of: type) -> tuple[str, ...]:
    """The fields of a dataclass."""
    return tuple(f.name for f in fields(of))


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hints[name] for name in names(kind)}


def read_json(path: Path) -> object:
    """The value in a JSON file; NaN, infinities and a key given twice are errors."""
    return read.read_json(path, kind=ProfileError, parse=_parse)


def write_json(value: object, indent: str = "") -> str:
    """JSON for people and for diffs: a key a line, and a list of plain values on one line."""
    deeper = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{deeper}{json.dumps(key)}: {write_json(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + indent + "}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(deeper + write_json(item, deeper) for item in value) + "\n" + indent + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _parse(text: str) -> object:
    return read.json_of(text, parse_constant=_no_constant, object_pairs_hook=_unique_keys)


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not a number")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {cut(next(key for key in counts if counts[key] > 1), 40)} is given twice")
    return values
