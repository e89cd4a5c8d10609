"""The replicas of a run, as a part of its page: its pools, the requests that moved, and the replicas over time."""

from ..results.manifest import FleetInfo, FleetRun, PoolInfo
from ..results.parts import PARTS
from .chart import Chart, colour
from .page import Block, Figure, Section, Table, table
from .table import number

CAPTION = (
    "Replicas that take requests (solid) and replicas that are paid for (dotted). Replicas that start or drain take no "
    "request and are paid for."
)


def of_replicas(fleet: FleetInfo | None, end: float) -> Section:
    """Tables of the pools and of requests' times, and a chart of scaled pools' replicas. end: of the run (s)."""
    if fleet is None:
        return Section("Replicas", ())
    pools = fleet.get("pools", [])
    scaled = [run for run in fleet.get("runs", []) if run.get("changes")]
    blocks: list[Block] = [] if len(pools) < 2 else [_pools(pools)]
    moved = [run for run in fleet.get("runs", []) if run.get("parts")]
    if moved:
        blocks.append(_parts(moved))
    if scaled:
        blocks += [_hours(scaled), _over_time(scaled, end)]
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


def _hours(runs: list[FleetRun]) -> Table:
    rows = []
    for run in runs:
        ready = [change[2] for change in run.get("changes", [])]
        rows.append((run.get("policy", ""), number(run.get("replica_hours")), f"{min(ready):,}", f"{max(ready):,}"))
    return table(
        ("policy", "replica-hours", "fewest of a pool", "most of a pool"), rows,
        caption="Replica-hours are paid for: from the decision to start a replica until its last request has ended.",
    )  # fmt: skip


def _over_time(runs: list[FleetRun], end: float) -> Figure:
    chart = Chart("time (s)", "replicas", legend=True)
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
