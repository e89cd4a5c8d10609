"""Fixed or scaled: the same setting with the fewest fixed replicas and with each scaler, as a section of a page."""

from collections.abc import Mapping
from typing import Any

from .digits import percent
from .page import Section, Words, table
from .table import number

HEAD = ("scaler", "GPU-hours", "of the fixed", "meet the SLOs", "worst quarter of an hour", "flaps", "to react")
CAPTION = (
    "On the trace's own arrivals, each fleet with the same replicas at the start. GPU-hours are paid for, start-up and "
    "draining included. A flap is a change of direction within five minutes. The oracle knows the trace: no operator "
    "has it, and it shows what a scaler could save."
)


def fixed_or_scaled(found: Mapping[str, Any] | None) -> list[Section]:
    """The section; none where no scaler was asked for."""
    if found is None:
        return []
    rows, goal = found["rows"], found["goal"]
    fixed = rows[0]
    lines = []
    for row in rows:
        share = 100 * row["gpu_hours"] / fixed["gpu_hours"]
        name = f"{row['replicas']} fixed" if row is fixed else row["scaler"].replace(",", ", ")
        worst = "–" if row["worst"] is None else f"{100 * row['worst']:.1f} %"
        answered = f"({row['answered']} of {row['rises']})"
        reacted = "–" if row["reaction"] is None else f"{number(row['reaction'])} s {answered}"
        met = f"{percent(row['attainment'], goal)} %"
        lines.append((name, number(row["gpu_hours"]), f"{share:.0f} %", met, worst, f"{row['flaps']:,}", reacted))
    return [Section("Fixed or scaled", (Words((_answer(found),)), table(HEAD, lines, caption=CAPTION)), spoken=True)]


def _answer(found: Mapping[str, Any]) -> str:
    rows, goal = found["rows"], found["goal"]
    fixed = rows[0]
    best = next(row for row in rows if row["scaler"] == found["best"])
    asked = f"{100 * goal:g} % of requests within the SLOs"
    if best is fixed:
        return f"No scaler meets {asked} for less than {fixed['replicas']} fixed replicas."
    saved = 100 * (1 - best["gpu_hours"] / fixed["gpu_hours"])
    name = best["scaler"].partition(",")[0]
    return (
        f"{name} meets {asked} for {number(best['gpu_hours'])} GPU-hours, {saved:.0f} % less than {fixed['replicas']} "
        f"fixed replicas ({number(fixed['gpu_hours'])})."
    )
