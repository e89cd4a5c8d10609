"""Scalers by name: shipped, or of a user's file."""

import math
from dataclasses import dataclass

from ...engine.allowed_code import NO_CODE, AllowedCode
from ...engine.errors import PolicyError, quoted
from ..by_name import new_part
from .hpa import Hpa
from .queued_forwards import QueuedForwards
from .scaler import PoolView, Scaler
from .schedule import Schedule

FIXED = "fixed"  # no scaler
SCALERS: dict[str, type[Scaler]] = {"schedule": Schedule, "hpa": Hpa, "queued-forwards": QueuedForwards}


@dataclass(frozen=True)
class Scaling:
    spec: str
    scaler: Scaler


def scaling(spec: str, allow_code: AllowedCode = NO_CODE) -> Scaling | None:
    """The scaler of a SPEC, None for `fixed`; errors as in by_name.new_part."""
    if spec == FIXED:
        return None
    scaler = new_part("scaler", spec, {FIXED: None, **SCALERS}, Scaler, allow_code)
    if not 0 < scaler.every < math.inf:
        raise PolicyError(f"scaler {quoted(spec)}: every is {scaler.every} s, expected above 0 and finite")
    return Scaling(spec, scaler)


__all__ = ["FIXED", "SCALERS", "PoolView", "Scaler", "Scaling", "scaling"]
