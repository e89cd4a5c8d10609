"""Parts shared by the pages of plan, capacity and tune: cautions, facts, quality, money."""

from collections.abc import Mapping
from typing import Any

from .page import Number, estimate
from .story import front_end

Json = Mapping[str, Any]  # as printed with --json


def cautions(info: Json, best: Json, ranked: str) -> tuple[tuple[str, str], ...]:
    """The cautions of a search: an estimated profile, a best policy of unknown quality."""
    found = [estimate(info["profile"], ranked)] if info.get("estimated") else []
    if best["quality"]["relative"] is None:
        why = f"There is no published score for the answers of {best['policy']}: {' '.join(best['quality']['notes'])}."
        found.append(("Quality unknown.", why))
    return tuple(found)


def facts(info: Json) -> dict[str, str | None]:
    """The facts of every search; None if missing."""
    return {
        "Profile": info["profile"] + (": estimated, not measured" if info.get("estimated") else ""),
        "Workload": info.get("workload"),
        "Front end": front_end(info) or None,
    }


def quality(fleet: Json) -> str:
    """The quality of a policy's answers, in percent of the full cache's."""
    relative = fleet["quality"]["relative"]
    return "unknown" if relative is None else f"{100 * relative:.1f} %"


def quality_number(fleet: Json) -> Number:
    """The quality of a policy's answers as a key number."""
    return Number("quality", ((None, quality(fleet)),), "of answers, compared with the full cache")


def money(amount: float, info: Json) -> str:
    return f"{amount:,.2f} {info['currency']}".rstrip() if info.get("currency") else f"{amount:,.2f}"


def in_currency(info: Json) -> str:
    """The unit of a fleet's cost."""
    return f"{info.get('currency') or ''} an hour".strip() if info["priced"] else "GPUs"
