"""The figures of a report, as Plotly figures: one idea each, one colour a policy everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from . import curves
from .metrics import good_requests, latencies
from .run import Columns, Run
from .slo import Slo

# Okabe and Ito's palette, told apart by colour-blind readers; yellow is left out on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("solid", "dot", "dashdot", "longdash")  # after seven policies the colours start again
INK, GRID = "#3c4043", "#e8eaed"
HEIGHT = 270  # pixels

REQUEST_NEEDS = (
    "status", "arrival", "scheduled", "first_commit", "first_block", "first_emission", "last_emission", "finish",
    "num_first", "num_tokens", "num_emissions",
)  # fmt: skip

# metric -> (title, unit, seconds to unit)
CDFS = {
    "ttft": ("Time to first token", "s", 1.0),
    "e2el": ("End-to-end latency", "s", 1.0),
    "norm_latency": ("Normalised latency (e2el / tokens)", "ms a token", 1e3),
    "tpot_chunk": ("Pace after the first emission (tpot_chunk)", "ms a token", 1e3),
}


@dataclass(frozen=True)
class Figure:
    """A figure with its title and what to read in it."""

    name: str
    title: str
    caption: str
    figure: go.Figure


def colour(index: int) -> str:
    """The policy's colour."""
    return COLOURS[index % len(COLOURS)]


def dashed(index: int) -> bool:
    """Whether the policy shares its colour with an earlier one, and its line is broken."""
    return index >= len(COLOURS)


def figures(run: Run) -> dict[str, list[Figure]]:
    """The report's figures by section; a section without data is left out."""
    slos = [Slo.parse(text) for text in run.info.get("slos", [])]
    missing_passes = bool(run.info.get("missing_passes", True))
    requests = {policy: run.requests(policy, REQUEST_NEEDS) for policy in run.policies}
    edges = curves.time_edges(run, list(requests.values()))
    replicas = max(1, run.info.get("replicas", 1))
    pages = {p["policy"]: (p.get("kv_pages") or 0) / replicas for p in run.info["policies"]}
    steps = {policy: curves.steps(run, policy, edges, pages[policy]) for policy in run.policies}
    sections = {
        "Latency": _latency(requests, slos),
        "SLO attainment": _attainment(run, requests, slos, missing_passes),
        "Timeline": _timeline(requests, steps, edges),
        "Steps": _steps(steps),
    }
    return {title: found for title, found in sections.items() if found}


def _latency(requests: dict[str, Columns], slos: Sequence[Slo]) -> list[Figure]:
    values = {policy: latencies(columns) for policy, columns in requests.items()}
    found = []
    for metric, (title, unit, scale) in CDFS.items():
        lines = [curves.distribution(v[metric] * scale) for v in values.values()]
        if not any(len(x) for x, _ in lines):
            continue
        bounds = [slo for slo in slos if slo.metric == metric]
        log = curves.spans_decades([x for x, _ in lines])
        figure = _figure(f"{metric} ({unit})", "share of completed requests", percent=True)
        for i, (policy, (x, y)) in enumerate(zip(values, lines, strict=True)):
            figure.add_trace(_line(policy, i, x, y, f"%{{y:.1%}} within %{{x:.3~g}} {unit}"))
        if log:
            ticks = [m * 10.0**power for power in range(-6, 7) for m in (1, 2, 5)]
            figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,g}" for tick in ticks])
        else:
            # A few stragglers would squeeze everyone else to the left; zooming out shows them.
            ends = [float(np.interp(0.995, y, x)) for x, y in lines if len(x)]
            figure.update_xaxes(range=[0.0, 1.15 * max([*ends, *(slo.bound * scale for slo in bounds)])])
        for slo in bounds:
            _bound(figure, slo.bound * scale, str(slo), log)
        caption = "Up and to the left is better." + (" Dashed: the SLO's bound." if bounds else "")
        if metric == "tpot_chunk":
            caption += " Requests with a single emission have none."
        found.append(Figure(f"cdf-{metric}", title, caption, figure))
    return found


def _attainment(
    run: Run, requests: dict[str, Columns], slos: Sequence[Slo], missing_passes: bool
) -> list[Figure]:  # fmt: skip
    # A run's folder does not hold the requests' classes: SLOs of a class are in the table alone.
    judging = [slo for slo in slos if slo.stat is None and slo.slo_class is None]
    if not judging:
        return []
    caption = "Rejected and unfinished requests do not."
    if any(slo.slo_class is not None for slo in slos):
        caption += " SLOs of a class are in the table."
    labels = [str(slo) for slo in judging] + (["all of them"] if len(judging) > 1 else [])
    bars = _figure("", "share of arrivals", percent=True)
    over_time = _figure("arrival time (s)", "share of arrivals that are good", percent=True)
    worst = 1.0
    room = len(requests) < 5  # for a figure on each bar
    for i, (policy, columns) in enumerate(requests.items()):
        every = good_requests(columns, judging, missing_passes=missing_passes)
        each = [good_requests(columns, [slo], missing_passes=missing_passes) for slo in judging]
        shares = [float(good.mean()) if good is not None and len(good) else None for good in [*each, every]]
        text = ["" if share is None else f"{100 * share:.3g}%" for share in shares]
        bars.add_trace(
            go.Bar(
                x=labels, y=shares[: len(labels)], text=text[: len(labels)] if room else None, textposition="outside",
                name=policy, legendgroup=policy, marker={"color": colour(i)}, cliponaxis=False,
                hovertemplate="%{y:.1%} of arrivals meet %{x}",
            )
        )  # fmt: skip
        assert every is not None
        x, y = curves.share_by_arrival(columns["arrival"], every)
        over_time.add_trace(_line(policy, i, x, y, "%{y:.1%} of arrivals around %{x:.0f} s"))
        worst = min(worst, float(np.nanmin(y, initial=1.0)))
    # Near 100 % the last percents are what matters.
    over_time.update_yaxes(range=[worst - 0.02, 1.002] if worst > 0.8 else [0, 1.02])
    bars.update_yaxes(range=[0, 1.12], tickvals=[0, 0.25, 0.5, 0.75, 1])
    return [
        Figure("slo-bars", "Requests that meet the SLOs", caption, bars),
        Figure(
            "slo-time", "SLO attainment by arrival time", "When the traffic was too much for which policy.", over_time
        ),
    ]


def _timeline(requests: dict[str, Columns], steps: dict[str, curves.Steps], edges: Any) -> list[Figure]:
    middle = (edges[:-1] + edges[1:]) / 2
    queue = _figure("time (s)", "requests")
    panels = {
        "batch": ("Batch", "sequences in a decode step, mean of the busy replicas", "sequences", ""),
        "chunk": ("Chunk", "most positions a sequence computes in a decode step, mean", "positions", ""),
        "utilization": ("Token utilisation", "positions committed of those computed; prefill excluded", "share", "%"),
        "kv": ("KV occupancy", "share of a busy replica's KV pool that is held", "share", "%"),
    }
    drawn = {name: _figure("time (s)", axis, percent=bool(p)) for name, (_, _, axis, p) in panels.items()}
    for i, policy in enumerate(requests):
        queue.add_trace(
            _line(policy, i, middle, curves.waiting(requests[policy], edges), "%{y:,.1f} waiting at %{x:.0f} s")
        )
        for name, figure in drawn.items():
            form = "%{y:.1%} at %{x:.0f} s" if panels[name][3] else "%{y:.1f} at %{x:.0f} s"
            figure.add_trace(_line(policy, i, middle, getattr(steps[policy], name), form))
    drawn["utilization"].update_yaxes(range=None, autorange=True, rangemode="tozero")
    first = next(iter(requests.values()), None)
    found = [Figure("queue", "Queue", "Requests that have arrived and not begun, over all replicas.", queue)]
    found += [Figure(name, title, f"{about[0].upper()}{about[1:]}.", drawn[name])
              for name, (title, about, _, _) in panels.items()]  # fmt: skip
    if first is not None and len(first["arrival"]) > 1:
        bins = int(np.clip(len(first["arrival"]) // 20, 5, 100))
        counts = np.histogram(first["arrival"], np.linspace(0.0, float(edges[-1]), bins + 1))
        rate = counts[0] / np.diff(counts[1])
        load = _figure("time (s)", "req/s")
        load.add_trace(
            go.Scatter(x=counts[1][:-1], y=rate, mode="lines", line={"color": "#80868b", "width": 1.5, "shape": "hv"},
                       fill="tozeroy", fillcolor="rgba(128,134,139,0.15)", hovertemplate="%{y:.2f} req/s at %{x:.0f} s",
                       name="arrivals")
        )  # fmt: skip
        found.insert(0, Figure("load", "Arrivals", "The same requests for every policy.", load))
    for each in found:
        each.figure.update_xaxes(range=[0.0, float(edges[-1])])
        each.figure.update_traces(line_width=1.5)
    return found


def _steps(steps: dict[str, curves.Steps]) -> list[Figure]:
    values = sorted({int(c) for s in steps.values() for c in s.chunks})
    if not values:
        return []
    histogram = _figure("chunk (positions)", "share of decode steps", percent=True)
    by_chunk = _figure("chunk (positions)", "committed / computed", percent=True)
    latency = _figure("tokens in the step", "latency (ms)")
    # Each chunk gets a slot of its own: 4, 8, 16 and 32 are neighbours.
    slots = {value: slot for slot, value in enumerate(values)}
    for i, (policy, s) in enumerate(steps.items()):
        at = [slots[int(c)] for c in s.chunks]
        histogram.add_trace(
            go.Bar(x=at, y=s.chunk_share, customdata=s.chunks, name=policy, legendgroup=policy,
                   marker={"color": colour(i)}, hovertemplate="%{y:.1%} of steps at chunk %{customdata}")
        )  # fmt: skip
        line = _line(policy, i, at, s.chunk_utilization, "%{y:.1%} at chunk %{customdata}")
        line.update(mode="lines+markers", marker={"size": 8, "color": colour(i)}, customdata=s.chunks)
        by_chunk.add_trace(line)
        latency.add_trace(
            go.Scatter(x=s.sample_tokens, y=s.sample_latency * 1e3, mode="markers", name=policy, legendgroup=policy,
                       marker={"color": colour(i), "size": 4, "opacity": 0.45},
                       hovertemplate="%{x:,} tokens in %{y:.1f} ms")
        )  # fmt: skip
    shown = values[:: max(1, len(values) // 12)]
    for figure in (histogram, by_chunk):
        figure.update_xaxes(tickvals=[slots[v] for v in shown], ticktext=[str(v) for v in shown])
        figure.update_xaxes(range=[-0.6, len(values) - 0.4])
        figure.update_yaxes(range=None, autorange=True, rangemode="tozero")
    latency.update_yaxes(rangemode="tozero")
    latency.update_xaxes(rangemode="tozero")
    return [
        Figure("chunks", "Chunk sizes", "How often a decode step ran at each chunk.", histogram),
        Figure("chunk-utilization", "Token utilisation by chunk", "A smaller chunk wastes less of a step.", by_chunk),
        Figure("step-latency", "Step latency by tokens", "A sample of the decode steps.", latency),
    ]


def _figure(x: str, y: str, *, percent: bool = False) -> go.Figure:
    axis = {
        "gridcolor": GRID, "linecolor": "#bdc1c6", "zeroline": False, "ticks": "outside", "tickcolor": "#bdc1c6",
        "automargin": True, "title": {"standoff": 8, "font": {"size": 12}},
    }  # fmt: skip
    figure = go.Figure()
    figure.update_layout(
        template=go.layout.Template(), height=HEIGHT, showlegend=False, hovermode="closest", bargap=0.25,
        paper_bgcolor="white", plot_bgcolor="white", margin={"l": 56, "r": 18, "t": 22, "b": 36},
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12, "color": INK},
    )  # fmt: skip
    figure.update_xaxes(**axis, title_text=x, showgrid=False)
    figure.update_yaxes(**axis, title_text=y)
    if percent:
        figure.update_yaxes(tickformat=".0~%", range=[0, 1.02])
    else:
        figure.update_yaxes(rangemode="tozero")
    return figure


def _line(policy: str, index: int, x: Any, y: Any, hover: str) -> go.Scatter:
    dash = LINES[index // len(COLOURS) % len(LINES)]
    return go.Scatter(
        x=x, y=y, mode="lines", name=policy, legendgroup=policy, hovertemplate=hover,
        line={"color": colour(index), "width": 2, "dash": dash},
    )  # fmt: skip


def _bound(figure: go.Figure, at: float, label: str, log: bool) -> None:
    figure.add_vline(x=at, line={"color": INK, "width": 1.2, "dash": "dash"})
    figure.add_annotation(
        x=float(np.log10(at)) if log else at, y=1, yref="paper", yanchor="bottom", text=label, showarrow=False,
        font={"size": 11, "color": INK},
    )  # fmt: skip
