"""A run's replicas: pools, moved requests, replicas over time."""

import numpy as np

from ..results.manifest import FleetInfo, FleetRun, PoolInfo
from ..results.metrics import Floats
from ..results.parts import PARTS
from .chart import GRID, Chart, colour
from .page import Block, Figure, Section, Table, table
from .table import number

CAPTION = (
    "Replicas that take requests (solid) and replicas that are paid for (dotted), and the rate of arrivals (grey, "
    "right). Replicas that start or drain take no request and are paid for: from the decision to start one until its "
    "last request has ended."
)
WINDOWS = 96  # of arrivals


def of_replicas(fleet: FleetInfo | None, end: float, arrival: Floats) -> Section:
    """Pools, parts of requests' times, scaled pools over time. end, arrival: s."""
    if fleet is None:
        return Section("Replicas", ())
    pools = fleet.get("pools", [])
    scaled = [run for run in fleet.get("runs", []) if run.get("changes")]
    blocks: list[Block] = [] if len(pools) < 2 else [_pools(pools)]
    moved = [run for run in fleet.get("runs", []) if run.get("parts")]
    if moved:
        blocks.append(_parts(moved))
    if scaled:
        blocks.append(_over_time(scaled, end, arrival))
    return Section("Replicas", tuple(blocks))


def _pools(pools: list[PoolInfo]) -> Table:
    rows = [
        (p.get("name", ""), f"{p.get('replicas', 0):,}", p.get("policy", ""), p.get("profile", {}).get("name", ""))
        for p in pools
    ]
    return table(("pool", "replicas at the start", "policy", "profile"), rows, left=frozenset({0, 2, 3}))


def _parts(runs: list[FleetRun]) -> Table:
    rows = []
    for run in runs:
        found = run.get("parts", {})
        milliseconds = (number(1e3 * found[name]) if name in found else "" for name in PARTS)
        rows.append((f"{run.get('moved', 0):,}", *milliseconds))
    return table(
        ("moved", *(f"{name.replace('_', ' ')} (ms)" for name in PARTS)), rows,
        caption="Requests that a prefill pool prefilled, and the mean times of a finished request: to its first tokens "
        "(up to first block), and the rest. Links: keys and values travel after the prefill, once pages are reserved.",
    )  # fmt: skip


def _over_time(runs: list[FleetRun], end: float, arrival: Floats) -> Figure:
    chart = Chart("time (s)", "replicas", legend=True)
    edges = np.linspace(0.0, max(end, 1e-9), WINDOWS + 1)
    rate = np.histogram(arrival, edges)[0] / np.diff(edges)
    middles, hover = (edges[:-1] + edges[1:]) / 2, "%{y:.3g} req/s around %{x:.0f} s"
    chart.line(middles, rate, "arrivals", hover=hover, yaxis="y2", line={"color": GRID, "width": 2})
    chart.layout["yaxis2"] = {
        "overlaying": "y", "side": "right", "rangemode": "tozero", "showgrid": False, "title": {"text": "req/s"},
        "tickmode": "auto", "nticks": 5, "automargin": True,  # else its ticks copy the left axis's
    }  # fmt: skip
    lines = [(run, pool) for run in runs for pool in dict.fromkeys(change[1] for change in run.get("changes", []))]
    for i, (run, pool) in enumerate(lines):
        changes = [change for change in run.get("changes", []) if change[1] == pool]
        times = [change[0] for change in changes] + [max(end, changes[-1][0])]
        name = f"{run.get('policy', '')}, {pool}" if len(lines) > len(runs) else run.get("policy", "")
        for column, dash, what in ((2, "solid", "taking requests"), (3, "dot", "paid for")):
            counts = [change[column] for change in changes]
            chart.line(
                times, [*counts, counts[-1]], f"{name}: {what}", i, hover="%{y} at %{x:.1f} s",
                line={"color": colour(i), "width": 2, "dash": dash, "shape": "hv"},
            )  # fmt: skip
    return Figure("replicas", "Replicas over time", CAPTION, chart, time=True)
