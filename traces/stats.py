"""A trace's rate, burstiness and lengths."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from .trace import Floats, Ints, Trace

MOST_WINDOWS = 10_000_000
EQUAL = 1e-4  # a smaller variation of the gaps is the rounding of times


def describe(trace: Trace) -> dict[str, Any]:
    """A plain dict; None if the trace is too short."""
    duration, rate = None, None
    if len(trace) > 1:
        duration = trace.duration
    if not math.isnan(trace.rate):
        rate = trace.rate
    return {
        "name": trace.name,
        "num_requests": len(trace),
        **asdict(trace.notes),
        "duration": duration,
        "rate": rate,
        "cv": gap_cv(trace.arrival),
        "by_minute": rates(trace.arrival, 60.0),
        "by_hour": rates(trace.arrival, 3600.0),
        "input_length": describe_lengths(trace.input_length),
        "output_length": describe_lengths(trace.output_length),
        "repeated_hash_ids": repeated_hash_ids(trace),
        "extras": sorted(trace.extras),
    }


def describe_lengths(lengths: Ints) -> dict[str, float]:
    quantiles = np.percentile(lengths, (0, 50, 90, 99, 100)).tolist()
    facts = {"mean": float(lengths.mean()), "std": float(lengths.std()), "total": int(lengths.sum())}
    return facts | dict(zip(("min", "p50", "p90", "p99", "max"), quantiles, strict=True))


def gap_cv(arrival: Floats) -> float | None:
    """Coefficient of variation; None below two gaps, or if all are 0."""
    gaps = np.diff(arrival)
    if len(gaps) < 2 or not gaps.any():
        return None
    mean = float(gaps.mean())
    cv = float(gaps.std()) / mean
    return 0.0 if cv <= EQUAL else cv


def rates_of(arrival: Floats, window: float) -> Floats:
    """req/s of whole windows of `window` s from the first arrival on; none of a trace too short, or almost empty."""
    num = math.floor(float(arrival[-1] - arrival[0]) / window)
    if not 0 < num < MOST_WINDOWS:
        return np.zeros(0)
    number = ((arrival - arrival[0]) / window).astype(np.int64)
    return np.bincount(number, minlength=num)[:num] / window


def rates(arrival: Floats, window: float) -> dict[str, Any] | None:
    """req/s by window (s)."""
    values = rates_of(arrival, window)
    if not len(values):
        return None
    p50, p90 = np.quantile(values, (0.5, 0.9), method="inverted_cdf").tolist()
    return {
        "num": len(values),
        "mean": float(values.mean()),
        "p50": p50,
        "p90": p90,
        "peak": float(values.max()),
        "peak_at": int(values.argmax()),
    }


def repeated_hash_ids(trace: Trace) -> float | None:
    """The share of prompt blocks seen before: an unlimited prefix cache's reuse."""
    blocks = [block for ids in trace.extras.get("hash_ids", ()) if ids for block in ids]
    return None if not blocks else 1 - len(set(map(str, blocks))) / len(blocks)
