"""A comparison's figures: one colour per policy, predicted dotted, measured solid."""

from collections.abc import Sequence

import numpy as np

from ..report.chart import INK, Chart, colour
from ..report.page import Figure
from ..results import curves
from ..results.metrics import METRICS, Floats
from ..results.run import Run
from . import words
from .cells import PER_REQUEST, Comparison, PolicyErrors
from .parts import per_request

MAX_POINTS = 2000  # of a scatter plot


def overview(found: Comparison) -> list[Figure]:
    chart = _chart("", "error of the mean", percent=True)
    names = [name for name in PER_REQUEST if any(not np.isnan(c.metrics[name].error["mean"]) for c in found.cells)]
    for i, cell in enumerate(found.cells):
        chart.add("bar", x=names, y=[cell.metrics[name].error["mean"] for name in names], name=cell.name,
                   marker={"color": colour(i)}, hovertemplate=f"%{{x}} of {cell.name}: %{{y:+.2%}}")  # fmt: skip
    chart.layout["showlegend"] = True
    return [Figure("errors", "Errors of the means", "Above zero the first run's mean is larger.", chart)]


def of_cell(found: Comparison, i: int, pair: tuple[Run, Run]) -> list[Figure]:
    """Paired requests and steps, distributions."""
    cell = found.cells[i]
    heads = words.heads(found.pairs[cell.pair])
    values = _values(cell, pair)
    figures = []
    if not cell.unpaired:
        p, m = values["e2el"]
        known = ~(np.isnan(p) | np.isnan(m))
        figures.append(
            Figure(f"requests-{i}", "Requests", "Each point is a request; on the line both runs agree.",
                   _scatter(m[known], p[known], i, [f"e2el {head} (s)" for head in heads]))
        )  # fmt: skip
    if cell.steps is not None and cell.steps.same:
        figures.append(_steps(i, cell, pair, heads))
    figures += [_distribution(i, name, p, m, heads) for name, (p, m) in values.items() if not np.isnan(m).all()]
    return figures


def _steps(i: int, cell: PolicyErrors, pair: tuple[Run, Run], heads: Sequence[str]) -> Figure:
    sides = []
    for run in pair:
        steps = run.steps(cell.policy, ["replica", "step", "latency"])
        sides.append(steps["latency"][np.lexsort((steps["step"], steps["replica"]))])
    p, m = (1e3 * latency for latency in sides)
    return Figure(
        f"steps-{i}", "Steps", "Each point is a step that both runs planned alike; on the line they agree.",
        _scatter(m, p, i, [f"latency {head} (ms)" for head in heads]),
    )  # fmt: skip


def _distribution(i: int, name: str, p: Floats, m: Floats, heads: Sequence[str]) -> Figure:
    chart = _chart(f"{name} ({METRICS[name].unit})", "share of requests", percent=True)
    chart.y["range"] = [0, 1.02]
    for values, head, dash in ((m, heads[1], "solid"), (p, heads[0], "dot")):
        x, y = curves.distribution(1e3 * values)
        chart.add("scatter", x=x, y=y, mode="lines", name=head, line={"color": colour(i), "width": 2, "dash": dash},
                       hovertemplate=f"{head}: %{{y:.1%}} within %{{x:.3~g}} ms")  # fmt: skip
    ends = [1e3 * float(np.nanquantile(values, 0.995)) for values in (p, m) if not np.isnan(values).all()]
    chart.x["range"] = [0.0, 1.1 * max(ends) or 1.0]
    chart.layout["showlegend"] = True
    title = {"itl": "itl, a request's mean gap"}.get(name, name)
    return Figure(f"cdf-{name}-{i}", title, "Over the requests that completed in each run.", chart)


def _scatter(x: Floats, y: Floats, index: int, axes: Sequence[str]) -> Chart:
    chart = _chart(axes[1], axes[0])
    some = np.arange(len(x))[:: max(1, -(-len(x) // MAX_POINTS))]
    chart.add(
        "scatter",
        x=x[some],
        y=y[some],
        mode="markers",
        marker={"color": colour(index), "size": 4, "opacity": 0.5},
        hovertemplate="%{y:.4~g} against %{x:.4~g}",
        showlegend=False,
    )
    end = 1.03 * float(max(x.max(initial=0.0), y.max(initial=0.0))) or 1.0
    chart.add("scatter", x=[0, end], y=[0, end], mode="lines", line={"color": INK, "width": 1, "dash": "dash"},
                   hoverinfo="skip", showlegend=False)  # fmt: skip
    chart.x["range"] = [0, end]
    chart.y["range"] = [0, end]
    return chart


def _values(cell: PolicyErrors, pair: tuple[Run, Run]) -> dict[str, tuple[Floats, Floats]]:
    """In s; NaN if not completed."""
    columns = [run.requests(cell.policy) for run in pair]
    index = np.intersect1d(columns[0]["request"], columns[1]["request"]).astype(np.int64)
    p, m = (per_request(c, index) for c in columns)
    return {name: (p[name], m[name]) for name in PER_REQUEST}


def _chart(x: str, y: str, *, percent: bool = False) -> Chart:
    chart = Chart(x, y)
    chart.layout["margin"]["t"] = 44
    if percent:
        chart.y["tickformat"] = ".1~%"
    return chart
