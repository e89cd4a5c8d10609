"""Cost against latency of a plan's fleets, with the Pareto front."""

import math

from ..results.slo import Slo
from .chart import INK, Chart, colour, logarithmic
from .fleet import cost_of, name_of
from .page import Figure, Section
from .search import Json, in_currency

METRICS = ("ttft", "norm_latency", "tpot_chunk")  # in a plan's JSON
WIDE = 8.0  # ratio of latencies for a logarithmic axis


def pareto(info: Json) -> tuple[Section, ...]:
    """One chart per SLO's metric, at most two; none for one fleet."""
    slos = [Slo.parse(text) for text in info.get("slos", [])]  # from Python there may be none
    metrics = [m for m in dict.fromkeys(slo.metric for slo in slos) if m in METRICS] or ["norm_latency"]
    drawn = (_picture(info, metric, [slo for slo in slos if slo.metric == metric]) for metric in metrics[:2])
    figures = tuple(figure for figure in drawn if figure is not None)
    return (Section("Cost against latency", figures),) if figures else ()


def _picture(info: Json, metric: str, slos: list[Slo]) -> Figure | None:
    lines = []
    for fleet in info["ranking"]:
        points = [(cost_of(info, s), s["p90_ms"].get(metric), s["meets"], s["gpus"]) for s in fleet["sizes"]]
        lines.append((name_of(fleet), [p for p in points if p[1]]))
    every = [point for _, points in lines for point in points]
    if len(every) < 2:
        return None
    chart = Chart(in_currency(info), f"{metric}, p90 (ms)", height=330, legend=True)
    front = _front([(cost, latency) for cost, latency, meets, _ in every if meets])
    chart.line(
        [cost for cost, _ in front], [latency for _, latency in front], "no other is cheaper and faster",
        line={"color": INK, "width": 1.2, "dash": "dot", "shape": "hv"}, hoverinfo="skip", hovertemplate=None,
    )  # fmt: skip
    for i, (name, points) in enumerate(lines):
        chart.line(
            [cost for cost, *_ in points], [latency for _, latency, *_ in points], name, i, mode="lines+markers",
            line={"color": colour(i), "width": 1}, customdata=[gpus for *_, gpus in points],
            marker={"color": colour(i), "size": 10,
                    "symbol": ["circle" if meets else "circle-open" for _, _, meets, _ in points]},
            hover="%{y:,.0f} ms for %{x:,.2f} with %{customdata} GPUs",
        )  # fmt: skip
    latencies = [latency for _, latency, *_ in every]
    if max(latencies) > WIDE * min(latencies):
        logarithmic(chart.y)
    for slo in slos:
        if min(latencies) / 3 < 1e3 * slo.bound < 3 * max(latencies):  # a distant line would flatten the rest
            chart.hline(1e3 * slo.bound, str(slo))
    chart.x["rangemode"] = "tozero"
    caption = (
        "Each dot is a fleet that the search tried, filled if it meets the SLOs. Latencies are 90th percentiles of the "
        "first replication. Down and to the left is better."
    )
    return Figure(f"pareto-{metric}", f"{metric} by cost", caption, chart)


def _front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Pareto-optimal, by cost."""
    front: list[tuple[float, float]] = []
    best = math.inf
    for cost, latency in sorted(points):
        if latency < best:
            front.append((cost, latency))
            best = latency
    return front
