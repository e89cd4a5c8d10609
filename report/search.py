"""Shared by the pages of plan, capacity and tune."""

from collections.abc import Mapping
from typing import Any

from .page import Number, estimate
from .story import front_end

Json = Mapping[str, Any]  # of --json


def cautions(info: Json, best: Json, ranked: str) -> tuple[tuple[str, str], ...]:
    """An estimated profile, an unknown quality."""
    found = [estimate(info["profile"], ranked)] if info.get("estimated") else []
    if best["quality"]["relative"] is None and not best["quality"].get("same"):
        why = f"There is no published score for the answers of {best['policy']}: {' '.join(best['quality']['notes'])}."
        found.append(("Quality unknown.", why))
    return tuple(found)


def facts(info: Json) -> dict[str, str | None]:
    """None if missing."""
    return {
        "Profile": info["profile"] + (": estimated, not measured" if info.get("estimated") else ""),
        "Workload": info.get("workload"),
        "Front end": front_end(info) or None,
        "Router": info.get("router"),
    }


def quality(fleet: Json) -> str:
    """In percent of the full cache's."""
    relative = fleet["quality"]["relative"]
    if relative is None and fleet["quality"].get("same"):
        return "the default's"
    return "unknown" if relative is None else f"{100 * relative:.1f} %"


def quality_number(fleet: Json) -> Number:
    return Number("quality", ((None, quality(fleet)),), "of answers, compared with the full cache")
