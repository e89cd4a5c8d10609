"""A part of a fleet by its SPEC, `name[,field=value...]` or `path/to/file.py:NAME[,field=value...]`."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from ..engine.allowed_code import AllowedCode
from ..engine.errors import PolicyError, quoted
from ..engine.outside import check_names_object, from_file, is_file, running_code_of

WANTED = {int: "a whole number", bool: "true or false", float: "a number"}


def made(
    what: str, spec: str, shipped: Mapping[str, type], base: type, allow_code: AllowedCode, others: Sequence[str] = ()
) -> Any:
    """Make the part that a SPEC names: a dataclass, shipped or of a user's file, whose fields are its settings.

    what: its kind, such as scaler. others: more names for an error. PolicyError for an unknown name, field or value;
    CodeError for a file not in `allow_code`.
    """
    kind, settings, asker = kind_of(what, spec, shipped, base, allow_code, others)
    try:
        with running_code_of(asker):
            hints = get_type_hints(kind)
            types = {field.name: hints[field.name] for field in fields(kind) if not field.name.startswith("_")}
            return kind(**values(settings, types, asker))
    except PolicyError as error:
        raise PolicyError(f"{asker}: {str(error).removeprefix(f'{asker}: ')}") from error.__cause__


def kind_of(
    what: str, spec: str, shipped: Mapping[str, type], base: type, allow_code: AllowedCode, others: Sequence[str] = ()
) -> tuple[Any, list[str], str]:
    """A SPEC's class, the items of its settings, and the beginning of an error; see `made`."""
    name, *settings = spec.split(",")
    asker = f"{what} {quoted(spec)}"
    if name in shipped:
        return shipped[name], settings, asker
    if is_file(name):
        kind = from_file(name, base, f"{what}s", asker, allow_code)
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise PolicyError(
                f"{asker}: it is a {type(kind).__name__}, expected a subclass of dsim.fleet.{base.__name__}"
            )
        return kind, settings, asker
    check_names_object(name, asker, what, what.upper())
    known = [*others, *shipped]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise PolicyError(f"{what} is {quoted(name)}{hint}, expected one of {', '.join(known)}")


def values(settings: Sequence[str], types: Mapping[str, Any], asker: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in settings:
        name, equals, text = item.partition("=")
        if not equals or name not in types:
            expected = f"one of {', '.join(types)}" if types else "none"
            raise PolicyError(f"{asker}: there is no field {quoted(name)}, expected {expected}")
        if name in found:
            raise PolicyError(f"{asker}: {name} is given twice, as {quoted(found[name])} and {quoted(text)}")
        try:
            found[name] = {"true": True, "false": False}[text] if types[name] is bool else types[name](text)
        except (ValueError, KeyError):
            wanted = WANTED.get(types[name], "a number")
            raise PolicyError(f"{asker}: {name} is {quoted(text)}, expected {wanted}") from None
    return found
