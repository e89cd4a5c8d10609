"""A sweep as one page: the best cell, heatmaps over two numeric fields, curves over one, and every cell in a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from .figures import COLOURS, INK, LINES, Figure, _figure, colour
from .html import STYLE, _plots
from .table import number

Row = Mapping[str, Any]

MAX_ROWS = 500  # of the table
MAX_PANELS = 24  # heatmaps of a metric
MAX_CURVES = len(COLOURS) * len(LINES)
REPLICATION = "seed"  # cells that differ in nothing else are drawn as their mean


@dataclass(frozen=True)
class Page:
    """What the page shows: the rows of the results' table, by column."""

    title: str
    varied: tuple[str, ...]
    rows: Sequence[Row]
    num_cells: int
    estimated: tuple[str, ...]  # profiles that were not measured
    interrupted: bool


@dataclass(frozen=True)
class Shown:
    """A metric worth drawing."""

    title: str
    unit: str
    scale: float
    higher: bool  # is better


METRICS = {
    "goodput": Shown("Goodput", "req/s", 1.0, True),
    "slo_attainment": Shown("SLO attainment", "% of arrivals", 100.0, True),
    "output_throughput": Shown("Output throughput", "tok/s", 1.0, True),
    "ttft_ms_p90": Shown("Time to first token, p90", "s", 1e-3, False),
    "norm_latency_ms_p90": Shown("Normalised latency (e2el / tokens), p90", "ms a token", 1.0, False),
    "tpot_chunk_ms_p90": Shown("Pace after the first emission (tpot_chunk), p90", "ms a token", 1.0, False),
    "busy_share": Shown("Share of time in steps", "%", 100.0, False),
    "quality": Shown("Quality", "score", 1.0, True),
}


@dataclass(frozen=True)
class Point:
    """The cells at one place, averaged over seeds."""

    value: float  # NaN where every cell failed
    low: float
    high: float
    num: int
    stable: bool
    failed: bool


def page(sweep: Page) -> str:
    """The page as HTML; the same rows give the same text."""
    found = _figures(sweep)
    body = [_header(sweep), *(_section(title, cards) for title, cards in found.items()), _cells(sweep), _footer()]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>dsim: {escape(sweep.title)}</title>",
            f"<style>{STYLE}\n{MORE_STYLE}</style>",
            f"<script>{get_plotlyjs()}</script>",
            "</head><body><main>",
            *body,
            f"<script>{_plots([figure for cards in found.values() for figure in cards])}</script>",
            "</main></body></html>\n",
        ]
    )


def _header(sweep: Page) -> str:
    failed = sum(row["error"] is not None for row in sweep.rows)
    unstable = sum(row.get("stable") is False for row in sweep.rows)
    parts = [f"<header><h1>{escape(sweep.title)}</h1>"]
    if sentence := _best(sweep):
        parts.append(f'<p class="answer">{escape(sentence)}</p>')
    if sweep.interrupted:
        parts.append(
            '<p class="alarm" role="alert"><strong>INTERRUPTED</strong> '
            f"{len(sweep.rows)} of {sweep.num_cells} cells are finished and shown; the same command goes on.</p>"
        )
    if failed:
        parts.append(
            f'<p class="alarm" role="alert"><strong>FAILED</strong> {failed} of {len(sweep.rows)} cells: '
            "the table says why.</p>"
        )
    if unstable:
        parts.append(
            f'<p class="alarm" role="alert"><strong>OVERLOADED</strong> {unstable} of {len(sweep.rows)} cells, marked '
            "✕: their queue grows without bound, and their latencies say how long the trace is.</p>"
        )
    if sweep.estimated:
        names = ", ".join(f"<code>{escape(name)}</code>" for name in sweep.estimated)
        some, was = ("The profile", "was") if len(sweep.estimated) == 1 else ("The profiles", "were")
        parts.append(
            f'<p class="caution"><strong>Estimated, not measured.</strong> {some} {names} {was} not measured on the '
            "device: trust the order of cells more than the numbers.</p>"
        )
    ranges = [(name, _range(_values(sweep.rows, name))) for name in sweep.varied]
    parts.append("<dl>")
    parts += [f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in ranges]
    return "".join([*parts, f"<div><dt>cells</dt><dd>{len(sweep.rows)}</dd></div></dl></header>"])


def _best(sweep: Page) -> str:
    """The best stable place in one sentence; empty when there is none."""
    metric = next((m for m in ("goodput", "output_throughput") if any(r.get(m) is not None for r in sweep.rows)), None)
    if metric is None:
        return ""
    names = [name for name in sweep.varied if name != REPLICATION]
    points = {place: point for place, point in _points(sweep.rows, names, metric).items() if point.stable}
    points = {place: point for place, point in points.items() if not math.isnan(point.value)}
    if not points:
        return "No cell is stable: every one is overloaded or failed."
    place, point = max(points.items(), key=lambda item: item[1].value)  # the first of equals
    shown = METRICS[metric]
    where = ", ".join(f"{name} = {_label(value)}" for name, value in zip(names, place, strict=True))
    return f"Highest stable {shown.title.lower()}: {number(point.value)} {shown.unit} at {where}."


def _figures(sweep: Page) -> dict[str, list[Figure]]:
    """By section. Numeric fields become axes: two a heatmap, one a curve; without one, bars."""
    names = [name for name in sweep.varied if name != REPLICATION and len(_values(sweep.rows, name)) > 1]
    axes = sorted((n for n in names if _numeric(sweep.rows, n)), key=lambda n: _priority(sweep.rows, n))
    drawn = [name for name in METRICS if any(row.get(name) is not None for row in sweep.rows)]
    sections: dict[str, list[Figure]] = {}
    if len(axes) > 1:
        x, y = axes[:2]
        for metric in drawn:
            sections[f"{METRICS[metric].title} by {x} and {y}"] = _heatmaps(sweep, metric, x, y, names)
    if axes:
        curves = [c for metric in drawn if (c := _curves(sweep, metric, axes[0], names)) is not None]
        sections[f"Curves over {axes[0]}"] = curves
    elif names:
        sections["Cells side by side"] = [_bars(sweep, metric, names) for metric in drawn]
    return {title: cards for title, cards in sections.items() if cards}


def _heatmaps(sweep: Page, metric: str, x: str, y: str, names: Sequence[str]) -> list[Figure]:
    """A map for each setting of the other fields, all on one scale."""
    shown = METRICS[metric]
    others = [name for name in names if name not in (x, y)]
    points = _points(sweep.rows, [x, y, *others], metric)
    xs, ys = _values(sweep.rows, x), _values(sweep.rows, y)
    # An overloaded cell's latency is as long as the trace: it must not take the scale from the rest.
    scale = [p.value * shown.scale for p in points.values() if p.stable and not math.isnan(p.value)]
    panels = list(dict.fromkeys(place[2:] for place in points))
    cards = []
    for i, rest in enumerate(panels[:MAX_PANELS]):
        grid = [[points.get((a, b, *rest)) for a in xs] for b in ys]
        figure = _figure(x, y)
        figure.add_trace(
            go.Heatmap(
                x=[_label(a) for a in xs], y=[_label(b) for b in ys],
                z=[[None if p is None or math.isnan(p.value) else p.value * shown.scale for p in row] for row in grid],
                text=[[_mark(p, shown) for p in row] for row in grid], texttemplate="%{text}", textfont={"size": 12},
                customdata=[[_hover(p, shown) for p in row] for row in grid],
                hovertemplate=f"{escape(x)} %{{x}}, {escape(y)} %{{y}}: %{{customdata}}<extra></extra>",
                colorscale="Cividis", reversescale=not shown.higher, xgap=2, ygap=2, showscale=True,
                zmin=min(scale, default=0.0), zmax=max(scale, default=1.0),
                colorbar={"thickness": 10, "outlinewidth": 0, "tickfont": {"size": 11}},
            )
        )  # fmt: skip
        # Each value has a slot of its own, as wide as the next.
        figure.update_xaxes(type="category")
        figure.update_yaxes(type="category", rangemode=None)
        figure.update_layout(height=max(240, 90 + 34 * len(ys)))
        title = ", ".join(f"{n} = {_label(v)}" for n, v in zip(others, rest, strict=True)) or shown.title
        cards.append(Figure(f"map-{metric}-{i}", title, f"{shown.unit}; brighter is better, ✕ is overloaded.", figure))
    return cards


def _curves(sweep: Page, metric: str, x: str, names: Sequence[str]) -> Figure | None:
    """A line for each setting of the other fields; None where there are too many to tell apart."""
    shown = METRICS[metric]
    others = [name for name in names if name != x]
    points = _points(sweep.rows, [*others, x], metric)
    lines = list(dict.fromkeys(place[:-1] for place in points))
    if len(lines) > MAX_CURVES:
        return None
    figure = _figure(x, shown.unit)
    values = []
    for i, rest in enumerate(lines):
        here = {place[-1]: point for place, point in points.items() if place[:-1] == rest}
        at = [(a, here[a]) for a in sorted(here) if not math.isnan(here[a].value)]
        y = [p.value * shown.scale for _, p in at]
        values += y
        name = ", ".join(
            _label(v) if isinstance(v, str) else f"{n} {_label(v)}" for n, v in zip(others, rest, strict=True)
        )
        figure.add_trace(
            go.Scatter(
                x=[a for a, _ in at], y=y, mode="lines+markers", name=name or shown.title, legendgroup=name,
                line={"color": colour(i), "width": 2, "dash": LINES[i // len(COLOURS)]},
                marker={"color": colour(i), "size": [7 if p.stable else 10 for _, p in at],
                        "symbol": ["circle" if p.stable else "x-thin" for _, p in at],
                        "line": {"width": 2, "color": colour(i)}},
                error_y=_whiskers([p for _, p in at], shown),
                customdata=[_hover(p, shown) for _, p in at],
                hovertemplate=f"{escape(name)}<br>{escape(x)} %{{x}}: %{{customdata}}<extra></extra>",
            )
        )  # fmt: skip
    if not values:
        return None
    if len(lines) > 1:
        figure.update_layout(showlegend=True, legend={"orientation": "h", "y": -0.28, "font": {"size": 11}})
    height = 300 + (18 * -(-len(lines) // 3) if len(lines) > 1 else 0)
    figure.update_layout(height=height, margin={"b": height - 250})
    positive = [v for v in values if v > 0]
    if not shown.higher and len(positive) == len(values) and max(values) > 30 * min(values):
        figure.update_yaxes(type="log", rangemode=None)
    better = "Higher" if shown.higher else "Lower"
    caption = f"{better} is better; ✕ is overloaded." if metric != "busy_share" else "✕ is overloaded."
    if any(p.num > 1 for p in points.values()):
        caption += " Means over seeds, with the range."
    return Figure(f"curve-{metric}", shown.title, caption, figure)


def _bars(sweep: Page, metric: str, names: Sequence[str]) -> Figure:
    shown = METRICS[metric]
    points = _points(sweep.rows, names, metric)
    labels = [", ".join(_label(value) for value in place) for place in points]
    figure = _figure("", shown.unit)
    figure.add_trace(
        go.Bar(
            x=labels, y=[None if math.isnan(p.value) else p.value * shown.scale for p in points.values()],
            text=[_mark(p, shown) for p in points.values()], textposition="outside", cliponaxis=False,
            marker={"color": [colour(0) if p.stable else "#bdc1c6" for p in points.values()]},
            customdata=[_hover(p, shown) for p in points.values()], hovertemplate="%{x}: %{customdata}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_layout(height=320)
    return Figure(f"bar-{metric}", shown.title, "Grey and ✕: overloaded.", figure)


def _points(rows: Sequence[Row], names: Sequence[str], metric: str) -> dict[tuple[Any, ...], Point]:
    """The metric at each place that these fields make, averaged over what is not among them."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    out = {}
    for place, members in groups.items():
        values = [float(row[metric]) for row in members if row.get(metric) is not None]
        mean = float(np.mean(values)) if values else math.nan
        failed = all(row["error"] is not None for row in members)
        stable = not any(row.get("stable") is False for row in members)
        low, high = min(values, default=math.nan), max(values, default=math.nan)
        out[place] = Point(mean, low, high, len(values), stable, failed)
    return out


def _whiskers(points: Sequence[Point], shown: Shown) -> dict[str, Any] | None:
    if all(p.num < 2 for p in points):
        return None
    up = [(p.high - p.value) * shown.scale for p in points]
    down = [(p.value - p.low) * shown.scale for p in points]
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.2, "width": 3}


def _mark(point: Point | None, shown: Shown) -> str:
    """The text in a cell of a map."""
    if point is None:
        return ""
    if point.failed:
        return "failed"
    value = "–" if math.isnan(point.value) else number(point.value * shown.scale)
    return value if point.stable else f"{value} ✕"


def _hover(point: Point | None, shown: Shown) -> str:
    if point is None:
        return "no cell"
    if point.failed:
        return "failed"
    text = "none" if math.isnan(point.value) else f"{number(point.value * shown.scale)} {shown.unit}"
    if point.num > 1:
        text += f" (mean of {point.num}, {number(point.low * shown.scale)} to {number(point.high * shown.scale)})"
    return text if point.stable else f"{text}, overloaded"


def _section(title: str, cards: Sequence[Figure]) -> str:
    drawn = "".join(
        f'<figure class="card"><h3>{escape(f.title)}</h3><p class="caption">{escape(f.caption)}</p>'
        f'<div class="plot" id="{f.name}" style="height:{f.figure.layout.height}px"></div></figure>'
        for f in cards
    )
    return f'<section><h2>{escape(title)}</h2><div class="grid">{drawn}</div></section>'


def _cells(sweep: Page) -> str:
    metrics = [name for name in METRICS if any(row.get(name) is not None for row in sweep.rows)]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in sweep.varied)
    head += "".join(
        f'<th scope="col">{escape(METRICS[name].title)}<br><span class="unit">{escape(METRICS[name].unit)}</span></th>'
        for name in metrics
    )
    lines = []
    for row in sweep.rows[:MAX_ROWS]:
        cells = "".join(f"<td>{escape(_label(row[name]))}</td>" for name in sweep.varied)
        if row["error"] is not None:
            cells += f'<td class="error" colspan="{len(metrics) + 1}">{escape(row["error"])}</td>'
        else:
            for name in metrics:
                value = row.get(name)
                cells += f"<td>{'–' if value is None else number(value * METRICS[name].scale)}</td>"
            cells += f"<td>{'✕ overloaded' if row.get('stable') is False else ''}</td>"
        lines.append(f"<tr>{cells}</tr>")
    caption = "All metrics are in results.csv and results.parquet; <code>dsim metrics</code> prints every formula."
    if len(sweep.rows) > MAX_ROWS:
        caption = f"The first {MAX_ROWS} of {len(sweep.rows)} cells. {caption}"
    return (
        '<section class="card table cells"><h2>Cells</h2><div class="scroll"><table><thead><tr>'
        f"{head}<th></th></tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f'<p class="caption">{caption}</p></section>'
    )


def _footer() -> str:
    return (
        "<footer><h2>Notes</h2><ul><li>Cells that share a seed meet the same requests with the same luck: differences "
        "between them are theirs.</li><li>Latencies cover completed requests.</li></ul></footer>"
    )


def _values(rows: Sequence[Row], name: str) -> list[Any]:
    """A field's values, numbers in their order and others as they come."""
    values = list(dict.fromkeys(row[name] for row in rows))
    return sorted(values) if values and all(_is_number(value) for value in values) else values


def _numeric(rows: Sequence[Row], name: str) -> bool:
    return all(_is_number(value) for value in _values(rows, name))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _priority(rows: Sequence[Row], name: str) -> tuple[bool, int]:
    """The load goes along x; then what has the most values."""
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


MORE_STYLE = f"""
.cells td, .cells th {{ text-align: right; }}
.cells thead th {{ min-width: 0; overflow-wrap: normal; }}
.cells td.error {{ text-align: left; color: #a50e0e; white-space: normal; }}
.unit {{ color: var(--soft); font-weight: 400; font-size: 12px; }}
.cells {{ margin-top: 24px; color: {INK}; }}
""".strip()
