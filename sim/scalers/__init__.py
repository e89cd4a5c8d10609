"""Scalers by name: the shipped ones, and scalers in a user's file."""

import difflib
import math
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from ...engine.allowed_code import NO_CODE, AllowedCode
from ...engine.errors import PolicyError, quoted
from ...engine.outside import check_names_object, from_file, is_file
from .dynamo_load import DynamoLoad
from .dynamo_throughput import DynamoThroughput
from .hpa import Hpa
from .oracle import Oracle
from .queued_forwards import QueuedForwards
from .scaler import PoolView, Scaler
from .schedule import Schedule
from .wva_v2 import WvaV2

FIXED = "fixed"  # no scaler: the number of replicas stays
SCALERS: dict[str, type[Scaler]] = {
    "schedule": Schedule, "hpa": Hpa, "dynamo-load": DynamoLoad, "dynamo-throughput": DynamoThroughput,
    "wva-v2": WvaV2, "queued-forwards": QueuedForwards, "oracle": Oracle,
}  # fmt: skip
KNOWN = (FIXED, *SCALERS)


@dataclass(frozen=True)
class Scaling:
    """A scaler by its SPEC."""

    spec: str
    scaler: Scaler

    @property
    def is_shipped(self) -> bool:
        """Whether it is one of this package's."""
        return type(self.scaler) in SCALERS.values()


def scaling(spec: str, allow_code: AllowedCode = NO_CODE) -> Scaling | None:
    """The scaler of a SPEC, `name[,field=value...]` or `path/to/file.py:NAME[,field=value...]`; None for `fixed`.

    Raises PolicyError for an unknown name, field or value, and CodeError for a file that is not in `allow_code`.
    """
    name, *settings = spec.split(",")
    asker = f"scaler {quoted(spec)}"
    if name == FIXED and not settings:
        return None
    if name in SCALERS:
        kind: Any = SCALERS[name]
    elif is_file(name):
        kind = from_file(name, Scaler, "scalers", asker, allow_code)
        if not (isinstance(kind, type) and issubclass(kind, Scaler)):
            raise PolicyError(f"{asker}: it is a {type(kind).__name__}, expected a subclass of dsim.fleet.Scaler")
    else:
        check_names_object(name, asker, "scaler", "SCALER")
        close = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise PolicyError(f"scaler is {quoted(name)}{hint}, expected one of {', '.join(KNOWN)}")
    try:
        made = kind(**_values(kind, settings, asker))
    except PolicyError as error:
        raise PolicyError(f"{asker}: {str(error).removeprefix(f'{asker}: ')}") from None
    except Exception as error:  # whatever a file's code raises
        raise PolicyError(f"{asker}: {type(error).__name__}: {quoted(str(error))}") from error
    if not 0 < made.every < math.inf:
        raise PolicyError(f"{asker}: every is {made.every} s, expected above 0 and finite")
    return Scaling(spec, made)


def _values(kind: type[Scaler], settings: list[str], asker: str) -> dict[str, Any]:
    """A SPEC's fields, each of its type."""
    types = get_type_hints(kind)
    known = {field.name: types[field.name] for field in fields(kind) if not field.name.startswith("_")}
    found: dict[str, Any] = {}
    for item in settings:
        name, equals, text = item.partition("=")
        if not equals or name not in known:
            raise PolicyError(f"{asker}: there is no field {quoted(name)}, expected one of {', '.join(known)}")
        if name in found:
            raise PolicyError(f"{asker}: {name} is given twice, as {quoted(found[name])} and {quoted(text)}")
        try:
            found[name] = known[name](text)
        except ValueError:
            wanted = "a whole number" if known[name] is int else "a number"
            raise PolicyError(f"{asker}: {name} is {quoted(text)}, expected {wanted}") from None
    return found


__all__ = ["FIXED", "KNOWN", "SCALERS", "PoolView", "Scaler", "Scaling", "scaling"]
