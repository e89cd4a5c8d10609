"""The page of `dsim sweep`: best cell, curves over a field, table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np

from ..results.metrics import METRICS, Metric, led_by, path
from ..results.spread import Uncertain
from .chart import COLOURS, LINES, Chart, colour, logarithmic
from .ensemble import decided, of_ensemble
from .page import Figure, Number, Page, Row, Section, Table, estimate, priced_apart
from .table import number

Values = Mapping[str, Any]  # of the results

UNITS = {"rate": "req/s", "concurrency": "requests"}  # on the x axis
MAX_ROWS = 500  # of the table
MAX_CURVES = len(COLOURS) * len(LINES)
REPLICATION = "seed"  # cells that differ only in it are averaged


@dataclass(frozen=True)
class Swept:
    title: str
    varied: tuple[str, ...]
    rows: Sequence[Values]
    num_cells: int
    estimated: tuple[str, ...]  # not measured
    implementations: tuple[str, ...]  # that price the cells
    interrupted: bool
    facts: tuple[tuple[str, str], ...] = ()
    command: str = ""
    version: str = ""
    notes: tuple[str, ...] = ()  # on profiles
    ensemble: Uncertain | None = None


# By column. ttft and norm_latency show what e2el would.
DRAWN = {
    name if metric.of is None else f"{path(name)}_p90": replace(
        metric, title=metric.title if metric.of is None else f"{metric.title}, p90"
    )
    for name in led_by("goodput")
    if (metric := METRICS[name]).title and name != "e2el"
} | {"quality": Metric("score", "", better="high", title="Quality", axis="score")}


@dataclass(frozen=True)
class SweptPlace:
    """Cells that differ only in their seed, averaged."""

    value: float  # NaN: every cell failed
    low: float
    high: float
    num: int
    stable: bool


def sweep_page(sweep: Swept) -> Page:
    failed = sum(row["error"] is not None for row in sweep.rows)
    unstable = sum(row.get("stable") is False for row in sweep.rows)
    alarms = []
    if sweep.interrupted:
        alarms.append(
            f"INTERRUPTED {len(sweep.rows)} of {sweep.num_cells} cells are finished and shown; "
            "the same command continues."
        )
    if failed:
        alarms.append(f"FAILED {failed} of {len(sweep.rows)} cells: see the table.")
    if unstable:
        alarms.append(
            f"OVERLOADED {unstable} of {len(sweep.rows)} cells, marked ✕: their queue grows without bound, and their "
            "latencies measure the length of the trace."
        )
    title, figures = _figures(sweep)
    ranges = [(name, _range(_values(sweep.rows, name))) for name in sweep.varied]
    return Page(
        name=f"dsim: {sweep.title}",
        question="Which of these scenarios serves best?",
        answer=decided(_answer(sweep), sweep.ensemble),
        alarms=tuple(alarms),
        cautions=(estimate(", ".join(sweep.estimated), "cells"),) if sweep.estimated else (),
        numbers=_numbers(sweep, unstable, failed),
        chart=figures[0] if figures else None,
        facts=(("title", sweep.title), *sweep.facts, *ranges, ("cells", str(len(sweep.rows)))),
        sections=(
            *((Section(title, tuple(figures[1:])),) if figures[1:] else ()),
            Section("Cells", (_cells(sweep),)),
            *of_ensemble(sweep.ensemble),
        ),
        notes=(
            "Cells with the same seed have the same requests and random draws, so that they compare like with like.",
            "Latencies cover completed requests.",
            *sweep.notes,
        ),
        command=sweep.command,
        version=sweep.version,
    )


def _answer(sweep: Swept) -> str:
    """The best stable place; empty if every cell failed."""
    metric, place = _judge(sweep), _best(sweep)
    if metric is None:
        return ""
    if place is None:
        return "No cell is stable: every one is overloaded or failed."
    names, shown = _places(sweep), DRAWN[metric]
    value = _points(sweep.rows, names, metric)[place].value
    where = ", ".join(f"{name} = {_label(value)}" for name, value in zip(names, place, strict=True))
    where += priced_apart(sweep.implementations)
    return f"Highest stable {shown.title.lower()}: {number(value)} {shown.axis} at {where}."


def _numbers(sweep: Swept, unstable: int, failed: int) -> tuple[Number, ...]:
    numbers, place = [], _best(sweep)
    for name, shown in DRAWN.items() if place is not None else ():
        point = _points(sweep.rows, _places(sweep), name)[place or ()]
        if not math.isnan(point.value):
            value = f"{number(point.value * shown.scale)} {shown.axis}"
            numbers.append(Number(shown.title, ((None, value),), "of the best cell"))
    of = f"{unstable} overloaded, {failed} failed" if unstable or failed else "finished, none overloaded"
    return (*numbers[:3], Number("cells", ((None, f"{len(sweep.rows)} of {sweep.num_cells}"),), of))


def _judge(sweep: Swept) -> str | None:
    """Ranks cells; None if every cell failed."""
    return next((name for name in ("goodput", "output_throughput") if name in _known(sweep)), None)


def _known(sweep: Swept) -> dict[str, Metric]:
    """The metrics that some cell has."""
    return {name: shown for name, shown in DRAWN.items() if any(row.get(name) is not None for row in sweep.rows)}


def _places(sweep: Swept) -> list[str]:
    return [name for name in sweep.varied if name != REPLICATION]


def _best(sweep: Swept) -> tuple[Any, ...] | None:
    """Ties: the first."""
    metric = _judge(sweep)
    points = {} if metric is None else _points(sweep.rows, _places(sweep), metric)
    known = {place: p.value for place, p in points.items() if p.stable and not math.isnan(p.value)}
    return max(known, key=lambda place: known[place], default=None)


def _figures(sweep: Swept) -> tuple[str, list[Figure]]:
    """With their section's title; over the first field if none is numeric."""
    names = [name for name in sweep.varied if name != REPLICATION and len(_values(sweep.rows, name)) > 1]
    axes = sorted((n for n in names if _numeric(sweep.rows, n)), key=lambda n: _priority(sweep.rows, n))
    if not names:
        return "", []
    x = axes[0] if axes else names[0]
    curves = [c for metric in _known(sweep) if (c := _curves(sweep, metric, x, names)) is not None]
    return f"Curves over {x}" if axes else f"Cells by {x}", curves


def _curves(sweep: Swept, metric: str, x: str, names: Sequence[str]) -> Figure | None:
    """One line per setting of the other fields; None if too many."""
    shown = DRAWN[metric]
    others = [name for name in names if name != x]
    points = _points(sweep.rows, [*others, x], metric)
    lines = list(dict.fromkeys(place[:-1] for place in points))
    if len(lines) > MAX_CURVES:
        return None
    chart = Chart(f"{x} ({UNITS[x]})" if x in UNITS else x, shown.axis)
    values, numeric = [], _numeric(sweep.rows, x)
    for i, rest in enumerate(lines):
        here = {place[-1]: point for place, point in points.items() if place[:-1] == rest}
        at = [(a, here[a]) for a in _values(sweep.rows, x) if a in here and not math.isnan(here[a].value)]
        y = [p.value * shown.scale for _, p in at]
        values += y
        name = ", ".join(
            _label(v) if isinstance(v, str) else f"{n} {_label(v)}" for n, v in zip(others, rest, strict=True)
        )
        chart.add("scatter", x=[a if numeric else _label(a) for a, _ in at], y=y, name=name or shown.title,
                mode="lines+markers" if numeric else "markers",
                legendgroup=name,
                line={"color": colour(i), "width": 2, "dash": LINES[i // len(COLOURS)]},
                marker={"color": colour(i), "size": [7 if p.stable else 10 for _, p in at],
                        "symbol": ["circle" if p.stable else "x-thin" for _, p in at],
                        "line": {"width": 2, "color": colour(i)}},
                error_y=_whiskers([p for _, p in at], shown),
                customdata=[_hover(p, shown) for _, p in at],
                hovertemplate=f"{escape(name)}<br>{escape(x)} %{{x}}: %{{customdata}}<extra></extra>")  # fmt: skip
    if not values:
        return None
    if len(lines) > 1:
        chart.layout |= {"showlegend": True, "legend": {"orientation": "h", "y": -0.28, "font": {"size": 11}}}
    height = 300 + (18 * -(-len(lines) // 3) if len(lines) > 1 else 0)
    chart.layout["height"] = height
    chart.layout["margin"]["b"] = height - 250
    positive = [v for v in values if v > 0]
    if shown.better != "high" and len(positive) == len(values) and max(values) > 30 * min(values):
        logarithmic(chart.y)
        del chart.y["rangemode"]
    better = "Higher" if shown.better == "high" else "Lower"
    caption = f"{better} is better; ✕ is overloaded." if metric != "busy_share" else "✕ is overloaded."
    if any(p.num > 1 for p in points.values()):
        caption += " Means over seeds, with the range."
    return Figure(f"curve-{metric}", shown.title, caption, chart)


def _points(rows: Sequence[Values], names: Sequence[str], metric: str) -> dict[tuple[Any, ...], SweptPlace]:
    """By place (a combination of these fields), averaged over the others."""
    groups: dict[tuple[Any, ...], list[Values]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    out = {}
    for place, members in groups.items():
        values = [float(row[metric]) for row in members if row.get(metric) is not None]
        mean = float(np.mean(values)) if values else math.nan
        stable = not any(row.get("stable") is False for row in members)
        low, high = min(values, default=math.nan), max(values, default=math.nan)
        out[place] = SweptPlace(mean, low, high, len(values), stable)
    return out


def _whiskers(points: Sequence[SweptPlace], shown: Metric) -> dict[str, Any] | None:
    if all(p.num < 2 for p in points):
        return None
    up = [(p.high - p.value) * shown.scale for p in points]
    down = [(p.value - p.low) * shown.scale for p in points]
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.2, "width": 3}


def _hover(point: SweptPlace, shown: Metric) -> str:
    text = f"{number(point.value * shown.scale)} {shown.axis}"
    if point.num > 1:
        text += f" (mean of {point.num}, {number(point.low * shown.scale)} to {number(point.high * shown.scale)})"
    return text if point.stable else f"{text}, overloaded"


def _cells(sweep: Swept) -> Table:
    known = _known(sweep)
    odd = any(row.get("stable") is False for row in sweep.rows)
    head = [
        *sweep.varied,
        *(f"{shown.title} ({shown.axis})" for shown in known.values()),
        *([""] if odd else []),
    ]
    rows = []
    for row in sweep.rows[:MAX_ROWS]:
        cells = [_label(row[name]) for name in sweep.varied]
        if row["error"] is not None:
            rows.append(Row((*cells, row["error"]), failed=True))
            continue
        cells += ["–" if (v := row.get(name)) is None else number(v * shown.scale) for name, shown in known.items()]
        if odd:
            cells.append("✕ overloaded" if row.get("stable") is False else "")
        rows.append(Row(tuple(cells)))
    caption = "All metrics are in results.csv and results.parquet; dsim metrics prints every formula."
    if len(sweep.rows) > MAX_ROWS:
        caption = f"The first {MAX_ROWS} of {len(sweep.rows)} cells. {caption}"
    return Table(tuple(head), tuple(rows), caption=caption, left=frozenset())


def _values(rows: Sequence[Values], name: str) -> list[Any]:
    """Numbers sorted, others by appearance."""
    values = list(dict.fromkeys(row[name] for row in rows))
    return sorted(values) if values and all(_is_number(value) for value in values) else values


def _numeric(rows: Sequence[Values], name: str) -> bool:
    return all(_is_number(value) for value in _values(rows, name))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _priority(rows: Sequence[Values], name: str) -> tuple[bool, int]:
    """Load first, then most values."""
    return name not in ("rate", "concurrency"), -len(_values(rows, name))


def _range(values: Sequence[Any]) -> str:
    shown = [_label(value) for value in values]
    return ", ".join(shown) if len(shown) <= 8 else f"{shown[0]} to {shown[-1]} ({len(shown)} values)"


def _label(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
