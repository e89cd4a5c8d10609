"""A part of a fleet by its SPEC, `name[,field=value...]` or `path/to/file.py:NAME[,field=value...]`."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from ..engine.allowed_code import AllowedCode
from ..engine.errors import PolicyError, quoted
from ..engine.outside import check_names_object, from_file, is_file, running_code_of
from ..files.read import did_you_mean

READERS: dict[Any, Any] = {bool: {"true": True, "false": False}.__getitem__}
TYPES = {int: "a whole number", bool: "true or false", float: "a number"}


def new_part(role: str, spec: str, shipped: Mapping[str, type | None], base: type, allow_code: AllowedCode) -> Any:
    """Make the part that a SPEC names: a dataclass, shipped or of a user's file, whose fields are its settings.

    role: its kind, such as scaler. shipped: None for a name that takes no part. PolicyError for an unknown name, field
    or value; CodeError for a file not in `allow_code`.
    """
    kind, settings, asker = kind_of(role, spec, shipped, base, allow_code)
    try:
        with running_code_of(asker):
            hints = get_type_hints(kind)
            types = {field.name: hints[field.name] for field in fields(kind) if not field.name.startswith("_")}
            return kind(**values(settings, types, asker))
    except PolicyError as error:
        raise PolicyError(f"{asker}: {str(error).removeprefix(f'{asker}: ')}") from error.__cause__


def kind_of(
    role: str, spec: str, shipped: Mapping[str, type | None], base: type, allow_code: AllowedCode
) -> tuple[Any, list[str], str]:
    """A SPEC's class, the items of its settings, and the beginning of an error; see `new_part`."""
    name, *settings = spec.split(",")
    asker = f"{role} {quoted(spec)}"
    if shipped.get(name):
        return shipped[name], settings, asker
    if is_file(name):
        kind = from_file(name, base, f"{role}s", asker, allow_code)
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise PolicyError(
                f"{asker}: it is a {type(kind).__name__}, expected a subclass of dsim.fleet.{base.__name__}"
            )
        return kind, settings, asker
    check_names_object(name, asker, role, role.upper())
    raise PolicyError(f"{role} is {quoted(name)}{did_you_mean(name, shipped)}, expected one of {', '.join(shipped)}")


def values(settings: Sequence[str], types: Mapping[str, Any], asker: str) -> dict[str, Any]:
    by_name: dict[str, Any] = {}
    for item in settings:
        name, equals, text = item.partition("=")
        if not equals or name not in types or name in by_name:
            expected = f"one of {', '.join(types) or 'none'}"
            raise PolicyError(f"{asker}: there is no field {quoted(name)}, expected {expected}")
        read = READERS.get(types[name], types[name])
        try:
            by_name[name] = read(text)
        except (ValueError, KeyError):
            expected = TYPES.get(types[name], "a number")
            raise PolicyError(f"{asker}: {name} is {quoted(text)}, expected {expected}") from None
    return by_name
