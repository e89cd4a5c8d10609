"""What a buyer asks of a plan: the best that each GPU can do, and why the others lost."""

import math
from collections.abc import Mapping
from typing import Any

from .capacity import money
from .fleet import cost_of, met_share, name_of
from .page import Section, table

Json = Mapping[str, Any]  # what `dsim plan --json` prints


def by_gpu(info: Json) -> tuple[Section, ...]:
    """The cheapest fleet of each GPU, the recommendation first; nothing where there is one GPU."""
    best: dict[str, Json] = {}
    for fleet in (*info["ranking"], *info["left_out"]):
        known = best.setdefault(fleet["device"], fleet)
        if _cost(info, fleet) < _cost(info, known) and known not in info["ranking"]:
            best[fleet["device"]] = fleet
    if len(best) < 2:
        return ()
    rows = []
    for fleet in sorted(best.values(), key=lambda fleet: (fleet not in info["ranking"], _cost(info, fleet))):
        count, cost = _estimate(info, fleet)
        hourly = [cost] if info["priced"] else []
        rows.append([fleet["device"], fleet["policy"], count, *hourly, met_share(info, fleet), _why(info, fleet)])
    caption = (
        "The cheapest fleet of each GPU that was found to meet the SLOs. A number after 'about' is a short replay's "
        "estimate, and 'at least' is where the search stopped: two cheaper fleets were known by then."
    )
    head = ["GPU", "policy", "GPUs", *(["an hour"] if info["priced"] else []), "meet the SLOs", "why"]
    words = frozenset({0, 1, len(head) - 1})
    shown = table(head, rows, caption=caption, left=words, spare=("meet the SLOs",))
    return (Section("The best of each GPU", (shown,), spoken=True),)


def _replicas(fleet: Json) -> tuple[str, int | None]:
    """The replicas that a fleet needs, and how sure that is; None where that is not known."""
    if fleet["replicas"] is not None:
        return "", fleet["replicas"]
    if fleet["about"] is not None:
        return "about ", fleet["about"]
    return "at least ", fleet["least"]


def _cost(info: Json, fleet: Json) -> float:
    """The cost of a fleet, whether in the ranking or as far as it is known."""
    if fleet in info["ranking"]:
        return cost_of(info, fleet)
    _, replicas = _replicas(fleet)
    if replicas is None:
        return math.inf
    gpus = replicas * fleet["gpus_per_replica"]
    return float(gpus * fleet["price"] if info["priced"] else gpus)


def _estimate(info: Json, fleet: Json) -> tuple[str, str]:
    """The GPUs and the cost an hour of a fleet, with how sure they are; a dash where nothing is known."""
    sure, replicas = _replicas(fleet)
    if replicas is None:
        return "–", "–"
    gpus = fleet["gpus"] if fleet["gpus"] is not None else replicas * fleet["gpus_per_replica"]
    return f"{sure}{gpus:,}", f"{sure}{money(_cost(info, fleet), info)}" if info["priced"] else ""


def _why(info: Json, fleet: Json) -> str:
    """Why a GPU's best fleet was chosen, or lost."""
    best = info["recommended"]
    if fleet == best:
        return "the recommendation"
    if fleet not in info["ranking"]:
        return str(fleet["dropped"])
    more = cost_of(info, fleet) / cost_of(info, best) - 1
    if math.isclose(more, 0, abs_tol=1e-9):
        tied = name_of(fleet) in info["tied"]
        return "costs the same, and nothing tells it from the best" if tied else "costs the same, nearer to the bounds"
    return f"costs {100 * more:.0f} % more an hour" if info["priced"] else f"needs {100 * more:.0f} % more GPUs"
