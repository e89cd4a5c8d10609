"""The figures of a run's report, one colour per policy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..results.metrics import METRICS, good_requests, latencies, led_by
from ..results.run import Columns, Run
from ..results.slo import Slo
from . import curves
from .chart import Chart, colour, logarithmic
from .page import Figure

REQUEST_NEEDS = (
    "request", "replica", "status", "arrival", "input_length", "output_length", "scheduled", "first_commit",
    "first_block", "first_emission", "last_emission", "finish", "num_first", "num_tokens", "num_emissions",
    "num_preemptions",
)  # fmt: skip


def latency(requests: dict[str, Columns], slos: Sequence[Slo]) -> list[Figure]:
    """With the SLOs' bounds."""
    values = {policy: latencies(columns) for policy, columns in requests.items()}
    found = []
    for metric in led_by("ttft", "e2el"):
        shown = METRICS[metric]
        if not (shown.of and shown.title):
            continue
        unit, scale = shown.axis, 1e3 * shown.scale
        lines = {policy: curves.distribution(v[metric] * scale) for policy, v in values.items()}
        known = [(x, y) for x, y in lines.values() if len(x)]
        if not known:
            continue
        bounds = [slo for slo in slos if slo.metric == metric]
        log = curves.spans_decades([x for x, _ in known])
        chart = Chart(f"{metric} ({unit})", "share of completed requests", percent=True)
        for i, (policy, (x, y)) in enumerate(lines.items()):
            chart.line(x, y, policy, i, hover=f"%{{y:.1%}} within %{{x:.3~g}} {unit}")
        if log:
            logarithmic(chart.x)
        else:
            # Outliers would flatten the curves.
            end = max([float(np.interp(0.995, y, x)) for x, y in known] + [slo.bound * scale for slo in bounds])
            start = min(float(x[0]) for x, _ in known)
            # From zero, unless the curves lie in the axis's right half.
            start = 0.0 if start < 0.5 * end else start - 0.1 * (end - start)
            chart.x["range"] = [start, end + 0.1 * (end - start) or 1.0]
        for slo in bounds:
            chart.vline(slo.bound * scale, str(slo))
        caption = "Up and to the left is better." + (" Dashed: the SLO's bound." if bounds else "")
        if metric == "tpot_chunk":
            caption += " Requests with a single emission have none."
        found.append(Figure(f"cdf-{metric}", shown.title, caption, chart))
    return found


def attainment(requests: dict[str, Columns], slos: Sequence[Slo], missing_passes: bool) -> list[Figure]:
    """Shares of arrivals that meet all SLOs, over time."""
    # A run's folder lacks classes.
    judging = [slo for slo in slos if slo.stat is None and slo.slo_class is None]
    if not judging:
        return []
    chart = Chart("arrival time (s)", "share of arrivals that are good", percent=True)
    worst = 1.0
    for i, (policy, columns) in enumerate(requests.items()):
        good = good_requests(columns, judging, missing_passes=missing_passes)
        assert good is not None
        x, y = curves.share_by_arrival(columns["arrival"], good)
        chart.line(x, y, policy, i, hover="%{y:.1%} of arrivals around %{x:.0f} s")
        worst = min(worst, float(np.nanmin(y, initial=1.0)))
    # Near 100 %: the top only.
    chart.y |= {"range": [worst - 0.02, 1.002], "tickformat": ".1~%"} if worst > 0.8 else {"range": [0, 1.02]}
    caption = "The share of each window's arrivals that meet every SLO. Rejected and unfinished requests miss them."
    if len(judging) < len(slos):
        caption += " SLOs of a class or of a run's statistic are in the table."
    return [Figure("slo-time", "SLO attainment by arrival time", caption, chart, time=True)]


def timeline(requests: dict[str, Columns], steps: dict[str, curves.StepCurves], edges: Any) -> list[Figure]:
    middle = (edges[:-1] + edges[1:]) / 2
    queue = Chart("time (s)", "requests")
    panels = {
        "batch": ("Batch", "sequences in a decode step, mean of the busy replicas", "sequences", ""),
        "chunk": ("Chunk", "most positions a sequence computes in a decode step, mean", "positions", ""),
        "utilization": ("Token utilisation", "positions committed of those computed; prefill excluded", "share", "%"),
        "kv": ("KV occupancy", "share of a busy replica's KV pool that is held", "share", "%"),
    }
    drawn = {name: Chart("time (s)", axis, percent=bool(p)) for name, (_, _, axis, p) in panels.items()}
    for i, policy in enumerate(requests):
        waiting = curves.waiting(requests[policy], edges)
        queue.line(middle, waiting, policy, i, hover="%{y:,.1f} waiting at %{x:.0f} s")
        for name, chart in drawn.items():
            form = "%{y:.1%} at %{x:.0f} s" if panels[name][3] else "%{y:.1f} at %{x:.0f} s"
            chart.line(middle, getattr(steps[policy], name), policy, i, hover=form)
    for name in ("utilization", "kv"):
        del drawn[name].y["range"]  # the largest value sets it
    del drawn["chunk"].y["rangemode"]  # may be nearly constant
    first = next(iter(requests.values()), None)
    found = [Figure("queue", "Queue", "Requests that have arrived and not begun, over all replicas.", queue, time=True)]
    found += [Figure(name, title, f"{about[0].upper()}{about[1:]}.", drawn[name], time=True)
              for name, (title, about, _, _) in panels.items()]  # fmt: skip
    if first is not None and len(first["arrival"]) > 1:
        bins = int(np.clip(len(first["arrival"]) // 20, 5, 100))
        counts = np.histogram(first["arrival"], np.linspace(0.0, float(edges[-1]), bins + 1))
        rate = counts[0] / np.diff(counts[1])
        load = Chart("time (s)", "req/s")
        load.line(
            counts[1][:-1], rate, "arrivals", hover="%{y:.2f} req/s at %{x:.0f} s", fill="tozeroy",
            line={"color": "#80868b", "width": 1.5, "shape": "hv"}, fillcolor="rgba(128,134,139,0.15)",
        )  # fmt: skip
        found.insert(0, Figure("load", "Arrivals", "The same requests for every policy.", load, time=True))
    for each in found:
        each.chart.x["range"] = [0.0, float(edges[-1])]
        for trace in each.chart.data:
            trace["line"] |= {"width": 1.5}
    # A client's file has no queue or steps.
    return [each for each in found if any(not np.isnan(trace["y"]).all() for trace in each.chart.data)]


def by_chunk(steps: dict[str, curves.StepCurves]) -> list[Figure]:
    """Decode latency by tokens; with several chunk sizes histograms by chunk."""
    values = sorted({int(c) for s in steps.values() for c in s.chunks})
    if not values:
        return []
    cost = Chart("tokens in the step", "latency (ms)")
    for i, (policy, s) in enumerate(steps.items()):
        cost.add(
            "scatter", x=s.sample_tokens, y=s.sample_latency * 1e3, mode="markers", name=policy, legendgroup=policy,
            marker={"color": colour(i), "size": 4, "opacity": 0.45}, hovertemplate="%{x:,} tokens in %{y:.1f} ms",
        )  # fmt: skip
    cost.x["rangemode"] = "tozero"
    found = [Figure("step-latency", "Step latency by tokens", "A sample of the decode steps.", cost)]
    if len(values) == 1:
        return found
    histogram = Chart("chunk (positions)", "share of decode steps", percent=True)
    yields = Chart("chunk (positions)", "committed / computed", percent=True)
    for i, (policy, s) in enumerate(steps.items()):
        at = list(map(str, s.chunks))
        histogram.add(
            "bar", x=at, y=s.chunk_share, name=policy, legendgroup=policy, marker={"color": colour(i)},
            hovertemplate="%{y:.1%} of steps at chunk %{x}",
        )  # fmt: skip
        yields.line(
            at, s.chunk_utilization, policy, i, hover="%{y:.1%} at chunk %{x}", mode="lines+markers",
            marker={"size": 8, "color": colour(i)},
        )  # fmt: skip
    for chart in (histogram, yields):
        # Equal distances between 4, 8, 16.
        chart.x |= {"type": "category", "categoryorder": "array", "categoryarray": list(map(str, values))}
        del chart.y["range"]
    return [
        Figure("chunks", "Chunk sizes", "The share of decode steps at each chunk size.", histogram),
        Figure(
            "chunk-utilization",
            "Token utilisation by chunk",
            "The share of computed positions that commit, by chunk size.",
            yields,
        ),
        *found,
    ]


def pool_sizes(run: Run) -> dict[str, float]:
    """KV pages a replica, by policy."""
    replicas = max(1, run.info.get("replicas", 1))
    return {p["policy"]: (p.get("kv_pages") or 0) / replicas for p in run.info["policies"]}
