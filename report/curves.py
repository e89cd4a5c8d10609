"""A run's columns as curves: distributions, means over time, counts by chunk, sampled steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..results.metrics import COMPLETED, REJECTED, Floats, ratio, rows_of
from ..results.run import Columns, Run

MAX_BINS = 300  # of a timeline
NUM_WINDOWS = 48  # of arrivals
MAX_POINTS = 400  # of a distribution
NUM_SAMPLES = 1200  # steps of a policy


@dataclass(frozen=True)
class StepCurves:
    """Decode steps: means over time (by latency, NaN while idle) and by chunk."""

    batch: Floats  # [bins]
    chunk: Floats  # [bins]
    utilization: Floats  # [bins], committed / computed
    kv: Floats  # [bins], share of a busy replica's pool, prefill too
    chunks: npt.NDArray[np.int64]
    chunk_share: Floats  # of decode steps
    chunk_utilization: Floats  # committed / computed
    sample_tokens: npt.NDArray[np.int64]  # sampled decode steps
    sample_latency: Floats  # s


def distribution(values: Floats) -> tuple[Floats, Floats]:
    """(value, share of requests up to it), denser in the tail; without NaN."""
    known = np.sort(values[~np.isnan(values)])
    n = len(known)
    if not n:
        return known, known
    if n <= MAX_POINTS:
        return known, np.arange(1, n + 1) / n
    half = MAX_POINTS // 2
    share = np.concatenate([np.linspace(0, 0.95, half, endpoint=False), np.linspace(0.95, 1, half)])
    return np.quantile(known, share), share


def time_edges(run: Run, columns: Sequence[Columns]) -> Floats:
    """Bins of several steps, shared by all policies."""
    ends = [float(np.nanmax(c["finish"])) for c in columns if not np.isnan(c["finish"]).all()]
    ends += [float(c["arrival"].max()) for c in columns if len(c["arrival"])]
    end = max(ends, default=0.0) or 1.0
    step = max((p["step_latency_ms"]["p99"] or 0.0) for p in run.info["policies"]) / 1e3 if ends else 0.0
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
    over = np.where(np.isnan(scheduled), requests["finish"][queued], scheduled)  # or cancelled in the queue
    waited = _time_since(requests["arrival"][queued], edges) - _time_since(over, edges)
    mean: Floats = np.diff(waited) / np.diff(edges)
    return np.maximum(mean, 0.0)  # rounding


def share_by_arrival(arrival: Floats, good: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """(middle of the window, share of good requests), by arrival."""
    if not len(arrival):
        return np.zeros(0), np.zeros(0)
    windows = int(min(NUM_WINDOWS, max(1, len(arrival) // 10)))
    end = float(arrival.max()) * (1 + 1e-12) or 1.0
    edges = np.linspace(float(arrival.min()), end, windows + 1)
    arrivals = np.histogram(arrival, edges)[0]
    share = ratio(np.histogram(arrival[good], edges)[0], arrivals)
    return (edges[:-1] + edges[1:]) / 2, share


def steps(run: Run, policy: str, edges: Floats, pages: float) -> StepCurves:
    """In one pass and constant memory. pages: of a replica's pool."""
    bins = len(edges) - 1
    sums = {name: np.zeros(bins) for name in ("time", "batch", "chunk", "tokens", "committed", "pages", "all_time")}
    by_chunk = np.zeros((3, 0))
    sample: list[tuple[Any, Any]] = []
    keep = min(1.0, NUM_SAMPLES * max(1, len(run.policies)) / max(1, run.num_steps))
    seen = 0
    names = ["start", "latency", "prefill", "batch", "chunk", "tokens", "committed", "pages"]
    for batch in run.step_batches(policy, names):
        at = np.clip(np.searchsorted(edges, batch["start"] + batch["latency"] / 2) - 1, 0, bins - 1)
        _add(sums["all_time"], at, batch["latency"])
        _add(sums["pages"], at, batch["latency"] * batch["pages"])
        decode = ~batch["prefill"]
        at, batch = at[decode], rows_of(batch, decode)
        _add(sums["time"], at, batch["latency"])
        for name in ("batch", "chunk"):
            _add(sums[name], at, batch["latency"] * batch[name])
        for name in ("tokens", "committed"):
            _add(sums[name], at, batch[name])
        by_chunk = _grow(by_chunk, int(batch["chunk"].max(initial=0)) + 1)
        for row, weight in enumerate((np.ones(len(at)), batch["tokens"], batch["committed"])):
            _add(by_chunk[row], batch["chunk"], weight)
        # A hash of the index has no period.
        index = np.arange(seen, seen + len(at), dtype=np.uint64)
        drawn = (index * np.uint64(2654435761)) % np.uint64(2**32) < np.uint64(int(keep * 2**32))
        sample.append((batch["tokens"][drawn], batch["latency"][drawn]))
        seen += len(at)
    chunks = np.flatnonzero(by_chunk[0])
    return StepCurves(
        batch=ratio(sums["batch"], sums["time"]),
        chunk=ratio(sums["chunk"], sums["time"]),
        utilization=ratio(sums["committed"], sums["tokens"]),
        kv=ratio(sums["pages"], sums["all_time"] * pages),
        chunks=chunks,
        chunk_share=by_chunk[0][chunks] / max(1, seen),
        chunk_utilization=ratio(by_chunk[2][chunks], by_chunk[1][chunks]),
        sample_tokens=np.concatenate([t for t, _ in sample] or [np.zeros(0, np.int64)]),
        sample_latency=np.concatenate([s for _, s in sample] or [np.zeros(0)]),
    )


def spans_decades(curves: Sequence[Floats]) -> bool:
    """Whether to use a logarithmic axis."""
    known = np.concatenate([c for c in curves if len(c)] or [np.ones(1)])
    low, high = np.quantile(known, [0.05, 0.99])
    return bool(low > 0 and high / low > 40 and math.isfinite(high))


def _time_since(times: Floats, edges: Floats) -> Floats:
    """Total time since all earlier times, at each edge."""
    passed = np.sort(times[~np.isnan(times)])
    count = np.searchsorted(passed, edges, side="right")
    total: Floats = count * edges - np.concatenate([[0.0], np.cumsum(passed)])[count]
    return total


def _add(sums: Floats, at: Any, values: Any) -> None:
    sums += np.bincount(at, weights=values, minlength=len(sums))


def _grow(table: Floats, columns: int) -> Floats:
    return np.pad(table, ((0, 0), (0, max(0, columns - table.shape[1]))))
