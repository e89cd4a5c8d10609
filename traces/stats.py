"""A trace's rate, burstiness and lengths."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .trace import Floats, Ints, Trace

MINUTE, HOUR = 60.0, 3600.0  # s
MOST_LISTED = 1440  # rates: a day of minutes
EQUAL = 1e-4  # a smaller variation of the gaps is the rounding of times
FANO_WINDOWS = (1.0, 10.0, 60.0)  # s


def describe(trace: Trace) -> dict[str, Any]:
    """A plain dict; None if the trace is too short."""
    notes = trace.notes
    has_arrivals = len(trace) > 1
    gaps = np.diff(trace.arrival)
    return {
        "name": trace.name,
        "path": notes.path,
        "format": notes.format,
        "num_requests": len(trace),
        "num_rows": notes.num_rows,
        "num_unsorted": notes.num_unsorted,
        "num_skipped": notes.num_skipped,
        "failed_in_trace": notes.failed_in_trace,
        "warnings": list(notes.warnings),
        "duration": trace.duration if has_arrivals else None,
        "rate": trace.rate if has_arrivals and not math.isnan(trace.rate) else None,
        "cv": gap_cv(trace.arrival) if has_arrivals else None,
        "zero_gaps": float((gaps == 0).mean()) if has_arrivals else None,
        "longest_gap": float(gaps.max()) if has_arrivals else None,
        "fano": {f"{w:g}": fano(trace.arrival, w) if has_arrivals else None for w in FANO_WINDOWS},
        "by_minute": rates(trace.arrival, MINUTE) if has_arrivals else None,
        "by_hour": rates(trace.arrival, HOUR) if has_arrivals else None,
        "input_length": describe_lengths(trace.input_length),
        "output_length": describe_lengths(trace.output_length),
        "repeated_hash_ids": repeated_hash_ids(trace),
        "extras": sorted(trace.extras),
    }


def describe_lengths(lengths: Ints) -> dict[str, float]:
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99)).tolist()
    return {
        "mean": float(lengths.mean()),
        "std": float(lengths.std()),
        "min": int(lengths.min()),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": int(lengths.max()),
        "total": int(lengths.sum()),
    }


def gap_cv(arrival: Floats) -> float | None:
    """Coefficient of variation; None below two gaps, or if all are 0."""
    gaps = np.diff(arrival)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    if len(gaps) < 2 or mean == 0:
        return None
    cv = float(gaps.std()) / mean
    return cv if cv > EQUAL else 0.0


def fano(arrival: Floats, window: float) -> float | None:
    """Variance / mean of arrivals in whole windows of `window` s; None below two windows.

    1 for Poisson arrivals, 0 for a constant rate.
    """
    found = busiest(arrival, window)
    if found is None or found.num_windows < 2:
        return None
    mean = float(found.counts.sum()) / found.num_windows
    return float((found.counts.astype(np.float64) ** 2).sum() / found.num_windows - mean**2) / mean


@dataclass(frozen=True)
class Busiest:
    """Whole windows from the first arrival on; req/s."""

    num_windows: int
    mean: float
    peak: float
    peak_at: int  # index
    # Only windows with arrivals: a long trace may be almost empty.
    windows: Ints
    counts: Ints


def busiest(arrival: Floats, window: float) -> Busiest | None:
    """window: s; None if the trace is shorter."""
    num_windows = math.floor(float(arrival[-1] - arrival[0]) / window) if len(arrival) else 0
    if not num_windows:
        return None
    number = np.floor((arrival - arrival[0]) / window)
    windows, counts = np.unique(number[number < num_windows].astype(np.int64), return_counts=True)
    at = int(np.argmax(counts))
    mean = float(counts.sum()) / (num_windows * window)
    return Busiest(num_windows, mean, float(counts[at]) / window, int(windows[at]), windows, counts)


def rates(arrival: Floats, window: float) -> dict[str, Any] | None:
    """req/s by window (s); `rates` lists at most MOST_LISTED."""
    found = busiest(arrival, window)
    if found is None:
        return None
    empty = found.num_windows - len(found.counts)
    ordered = np.sort(found.counts)

    def quantile(share: float) -> float:
        at = max(0, math.ceil(share * found.num_windows) - 1)  # nearest rank; empty windows come first
        return 0.0 if at < empty else float(ordered[at - empty]) / window

    listed = None
    if found.num_windows <= MOST_LISTED:
        every = np.zeros(found.num_windows)
        every[found.windows] = found.counts / window
        listed = every.tolist()
    return {
        "num": found.num_windows, "mean": found.mean, "min": quantile(0), "p50": quantile(0.5), "p90": quantile(0.9),
        "peak": found.peak, "peak_at": found.peak_at, "rates": listed,
    }  # fmt: skip


def repeated_hash_ids(trace: Trace) -> float | None:
    """The share of prompt blocks seen before: an unlimited prefix cache's reuse."""
    blocks = [block for ids in trace.extras.get("hash_ids", ()) if ids for block in ids]
    return 1 - len(set(map(str, blocks))) / len(blocks) if blocks else None
