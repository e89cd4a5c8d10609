"""A page's section: one setting with the fewest fixed replicas and with each scaler."""

from typing import Any

from .chart import Chart, colour
from .digits import percent
from .page import Block, Figure, Section, Words, table
from .replicas import draw_arrivals
from .search import Json
from .table import number

HEAD = ("scaler", "GPU-hours", "of the fixed", "meet the SLOs", "worst quarter of an hour", "flaps", "to react")
CAPTION = (
    "On the trace's own arrivals, each fleet with the same replicas at the start. GPU-hours are paid for, start-up and "
    "draining included. A flap is a change of direction within five minutes. To react: the mean time from a rise of "
    "the load until another replica takes requests, and after how many of the rises one came. The oracle knows the "
    "trace: no operator has it, and it shows what a scaler could save."
)
OVER_TIME = (
    "Replicas that take requests (solid) and that are paid for (dotted), and the rate of arrivals (grey, right): the "
    "fixed fleet, the best scaler and the oracle."
)
MET = "The share of the requests of each interval that meet all SLOs. Dashed: the share that is asked for."
HOUR = 3600.0


def fixed_or_scaled(found: Json | None) -> list[Section]:
    """Empty without scalers."""
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
    blocks: list[Block] = [Words((_answer(found),), loud=True), table(HEAD, lines, caption=CAPTION)]
    if len(found["arrivals"]) > 1:
        blocks += [_over_time(found), _met(found)]
    return [Section("Fixed or scaled", tuple(blocks), spoken=True)]


def _answer(found: Json) -> str:
    rows, goal = found["rows"], found["goal"]
    fixed, oracle = rows[0], next((row for row in rows if _name(row) == "oracle"), None)
    best = _best(found)
    asked = f"{100 * goal:g} % of requests within the SLOs"
    if best is fixed:
        said = f"Fixed: no scaler meets {asked} for less than {_fixed(fixed)}."
    else:
        said = (
            f"Scaled: {_name(best)} meets {asked} for {number(best['gpu_hours'])} GPU-hours, {_saved(best, fixed)} % "
            f"less than {_fixed(fixed)}."
        )
    if oracle is None:
        return said
    if oracle["attainment"] < goal:
        return f"{said} The oracle, which knows the trace, does not meet it either."
    if oracle["gpu_hours"] >= fixed["gpu_hours"]:
        return f"{said} The oracle, which knows the trace, saves nothing."
    return f"{said} The oracle, which knows the trace, takes {_saved(oracle, fixed)} % less."


def _fixed(row: Json) -> str:
    many = "1 fixed replica" if row["replicas"] == 1 else f"{row['replicas']} fixed replicas"
    return f"{many} ({number(row['gpu_hours'])} GPU-hours)"


def _saved(row: Json, fixed: Json) -> str:
    return f"{100 * (1 - row['gpu_hours'] / fixed['gpu_hours']):.0f}"


def _name(row: Json) -> str:
    return str(row["scaler"].partition(",")[0])


def _best(found: Json) -> Json:
    best: Json = next(row for row in found["rows"] if row["scaler"] == found["best"])
    return best


def _drawn(found: Json) -> list[tuple[str, Json]]:
    """Fixed, the best scaler (or the nearest to the goal), the oracle."""
    fixed, *scaled = found["rows"]
    real = [row for row in scaled if _name(row) != "oracle"]
    best = _best(found)
    if best is fixed and real:
        best = max(real, key=lambda row: row["attainment"])
    rows = [fixed, *([best] if best is not fixed else []), *(row for row in scaled if _name(row) == "oracle")]
    return [(f"{row['replicas']} fixed" if row is fixed else _name(row), row) for row in rows]


def _over_time(found: Json) -> Figure:
    unit, scale = _unit(found)
    chart = Chart(f"time ({unit})", "replicas", legend=True)
    interval = found["interval"]
    rates = [count / interval for count in found["arrivals"]]
    draw_arrivals(chart, _times(found), rates, f"%{{y:.3g}} req/s around %{{x:.3~g}} {unit}")
    end = interval * len(rates)
    for i, (name, row) in enumerate(_drawn(found)):
        changes = row["changes"] or [(0.0, row["replicas"], row["replicas"])]
        x = [change[0] / scale for change in changes] + [max(end, changes[-1][0]) / scale]
        for column, dash, what in ((1, "solid", "taking requests"), (2, "dot", "paid for")):
            if column == 2 and not row["changes"]:
                continue
            counts = [change[column] for change in changes]
            chart.line(
                x, [*counts, counts[-1]], f"{name}: {what}", i, hover=f"%{{y}} at %{{x:.3~f}} {unit}",
                line={"color": colour(i), "width": 2, "dash": dash, "shape": "hv"},
            )  # fmt: skip
    return Figure("scaled-replicas", "Replicas under the rate of arrivals", OVER_TIME, chart, wide=True)


def _met(found: Json) -> Figure:
    unit, _ = _unit(found)
    chart = Chart(f"time ({unit})", "meet the SLOs", percent=True, legend=True)
    for i, (name, row) in enumerate(_drawn(found)):
        chart.line(
            _times(found), row["intervals"], name, i, hover=f"%{{y:.1%}} around %{{x:.3~g}} {unit}",
            line={"color": colour(i), "width": 2, "shape": "hvh"},
        )  # fmt: skip
    chart.hline(found["goal"])
    minutes = found["interval"] / 60
    title = f"Attainment of each {minutes:g} minutes"
    return Figure("scaled-attainment", title, MET, chart, wide=True)


def _unit(found: Json) -> tuple[str, float]:
    """Of the time axis, and in s."""
    return ("h", HOUR) if found["interval"] * len(found["arrivals"]) > 3 * HOUR else ("s", 1.0)


def _times(found: Json) -> list[Any]:
    _, scale = _unit(found)
    return [(i + 0.5) * found["interval"] / scale for i in range(len(found["arrivals"]))]
