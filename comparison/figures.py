"""A comparison's figures: one colour per policy, predicted dotted, measured solid."""

from collections.abc import Sequence

import numpy as np

from ..report.chart import INK, Chart, colour
from ..report.page import Figure
from ..results import curves
from ..results.metrics import METRICS, Floats
from ..results.run import Run
from .comparison import PER_REQUEST, PolicyErrors
from .pairs import PolicyRuns
from .steps import Journal

MAX_POINTS = 2000  # of a scatter plot


def overview(cells: Sequence[PolicyErrors]) -> Figure:
    chart = _chart("", "error of the mean")
    chart.y["tickformat"] = ".1~%"
    names = [name for name in PER_REQUEST if any(cell.metrics[name].error["mean"] is not None for cell in cells)]
    for i, cell in enumerate(cells):
        chart.add("bar", x=names, y=[cell.metrics[name].error["mean"] for name in names], name=cell.name,
                   marker={"color": colour(i)}, hovertemplate=f"%{{x}} of {cell.name}: %{{y:+.2%}}")  # fmt: skip
    chart.layout["showlegend"] = True
    return Figure("errors", "Errors of the means", "Above zero the first run's mean is larger.", chart)


def of_cell(i: int, cell: PolicyErrors, heads: tuple[str, str], runs: tuple[Run, Run]) -> list[Figure]:
    """Paired requests and steps, distributions."""
    both = PolicyRuns(cell.policy, *runs)
    figures = []
    if not cell.unpaired:
        axes = [f"e2el {head} (s)" for head in heads]
        chart = _scatter(*both.values["e2el"], i, axes)
        caption = "Each point is a request; on the line both runs agree."
        figures.append(Figure(f"requests-{i}", "Requests", caption, chart))
    if cell.steps is not None and cell.steps.same:
        axes = [f"latency {head} (ms)" for head in heads]
        p, m = (1e3 * Journal.of(run, cell.policy).in_order["latency"] for run in runs)
        caption = "Each point is a step that both runs planned alike; on the line they agree."
        figures.append(Figure(f"steps-{i}", "Steps", caption, _scatter(p, m, i, axes)))
    for name in PER_REQUEST:
        p, m = both.values[name]
        if not np.isnan(m).all():
            chart = _distribution(i, f"{name} ({METRICS[name].unit})", p, m, heads)
            title = {"itl": "itl, a request's mean gap"}.get(name, name)
            figures.append(Figure(f"cdf-{name}-{i}", title, "Over the requests that completed in each run.", chart))
    return figures


def _distribution(i: int, axis: str, p: Floats, m: Floats, heads: tuple[str, str]) -> Chart:
    chart = _chart(axis, "share of requests")
    chart.y.update(tickformat=".1~%", range=[0, 1.02])
    for values, head, dash in ((m, heads[1], "solid"), (p, heads[0], "dot")):
        x, y = curves.distribution(1e3 * values)
        chart.add("scatter", x=x, y=y, mode="lines", name=head, line={"color": colour(i), "width": 2, "dash": dash},
                       hovertemplate=f"{head}: %{{y:.1%}} within %{{x:.3~g}} ms")  # fmt: skip
    ends = [1e3 * float(np.nanquantile(values, 0.995)) for values in (p, m) if not np.isnan(values).all()]
    chart.x["range"] = [0.0, 1.1 * max(ends) or 1.0]
    chart.layout["showlegend"] = True
    return chart


def _scatter(p: Floats, m: Floats, index: int, axes: Sequence[str]) -> Chart:
    """Points without NaN, predicted over measured."""
    chart = _chart(axes[1], axes[0])
    points = np.stack([m, p])[:, ~(np.isnan(p) | np.isnan(m))]
    x, y = points[:, :: max(1, -(-points.shape[1] // MAX_POINTS))]
    chart.add("scatter", x=x, y=y, mode="markers", marker={"color": colour(index), "size": 4, "opacity": 0.5},
                   hovertemplate="%{y:.4~g} against %{x:.4~g}", showlegend=False)  # fmt: skip
    end = 1.03 * float(points.max(initial=0.0)) or 1.0
    chart.add("scatter", x=[0, end], y=[0, end], mode="lines", line={"color": INK, "width": 1, "dash": "dash"},
                   hoverinfo="skip", showlegend=False)  # fmt: skip
    chart.x["range"] = chart.y["range"] = [0, end]
    return chart


def _chart(x: str, y: str) -> Chart:
    chart = Chart(x, y)
    chart.layout["margin"]["t"] = 44
    return chart
