"""A run's columns as curves: distributions, shares by arrival, means over time."""

from collections.abc import Sequence

import numpy as np

from .metrics import COMPLETED, REJECTED, Bools, Columns, Floats, ratio
from .run import Run

MAX_BINS = 300  # of a timeline
NUM_WINDOWS = 48  # of arrivals
MAX_POINTS = 400  # of a distribution
STEP_NEEDS = ("start", "latency", "prefill", "batch", "chunk", "pages")


def distribution(values: Floats) -> tuple[Floats, Floats]:
    """(value, share of requests up to it), denser in the tail; without NaN."""
    values = np.sort(values[~np.isnan(values)])
    n = len(values)
    if n <= MAX_POINTS:
        return values, np.arange(1, n + 1) / max(1, n)
    half = MAX_POINTS // 2
    share = np.concatenate([np.linspace(0, 0.95, half, endpoint=False), np.linspace(0.95, 1, half)])
    return np.quantile(values, share), share


def share_by_arrival(arrival: Floats, good: Bools) -> tuple[Floats, Floats]:
    """(mean arrival, share of good requests), by windows of equally many arrivals."""
    order = np.argsort(arrival, kind="stable")
    windows = [rows for rows in np.array_split(order, min(NUM_WINDOWS, max(1, len(order) // 10))) if len(rows)]
    return np.array([arrival[rows].mean() for rows in windows]), np.array([good[rows].mean() for rows in windows])


def time_edges(run: Run, requests: Sequence[Columns]) -> Floats:
    """Bins of several steps, shared by all policies."""
    times = [np.zeros(1), *(columns[name] for columns in requests for name in ("arrival", "finish"))]
    end = float(np.nanmax(np.concatenate(times))) or 1.0
    step = max(((summary.step_latency_ms.p99 or 0.0) / 1e3 for summary in run.info.policies), default=0.0)
    bins = min(MAX_BINS, max(10, int(end / (4 * step)))) if step else MAX_BINS
    return np.linspace(0.0, end, bins + 1)


def waiting(requests: Columns, edges: Floats) -> Floats:
    """Mean requests that arrived and have not begun, by bin; rejected ones do not count.

    NaN if begins are not recorded, as in a client's file.
    """
    queued = requests["status"] != REJECTED
    scheduled = requests["scheduled"][queued]
    if np.isnan(scheduled).all() and (requests["status"] == COMPLETED).any():
        return np.full(len(edges) - 1, np.nan)
    ends = np.where(np.isnan(scheduled), requests["finish"][queued], scheduled)  # or cancelled in the queue
    waited = _time_since(requests["arrival"][queued], edges) - _time_since(ends, edges)
    mean: Floats = np.diff(waited) / np.diff(edges)
    return np.maximum(mean, 0.0)  # rounding


def step_means(run: Run, policy: str, edges: Floats, pages: float) -> dict[str, Floats]:
    """Means over time by latency, NaN while idle, in one pass and constant memory; pages: of a replica's pool.

    `batch` and `chunk` of decode steps; `kv`, the share of a busy replica's pool, of prefill steps too.
    """
    bins = len(edges) - 1
    sums = {name: np.zeros(bins) for name in ("busy", "held", "decode", "batch", "chunk")}
    for steps in run.step_batches(policy, STEP_NEEDS):
        latency = steps["latency"]
        place = np.clip(np.searchsorted(edges, steps["start"] + latency / 2) - 1, 0, bins - 1)
        decode = np.where(steps["prefill"], 0.0, latency)
        sizes = {"busy": latency, "held": latency * steps["pages"], "decode": decode}
        sizes |= {name: decode * steps[name] for name in ("batch", "chunk")}
        for name, weight in sizes.items():
            sums[name] += np.bincount(place, weights=weight, minlength=bins)
    return {
        "batch": ratio(sums["batch"], sums["decode"]),
        "chunk": ratio(sums["chunk"], sums["decode"]),
        "kv": ratio(sums["held"], sums["busy"] * pages),
    }


def _time_since(times: Floats, edges: Floats) -> Floats:
    """Total time since all earlier times, at each edge."""
    passed = np.sort(times[~np.isnan(times)])
    count = np.searchsorted(passed, edges, side="right")
    total: Floats = count * edges - np.concatenate([[0.0], np.cumsum(passed)])[count]
    return total
