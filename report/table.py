"""Policies compared: numbers, units, the best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..results.metrics import METRICS, ROUNDING
from ..results.slo import Slo
from .digits import percent, within

Json = dict[str, Any]


@dataclass(frozen=True)
class MetricRow:
    label: str
    unit: str
    cells: tuple[str, ...]  # by policy
    best: frozenset[int]  # policies; empty if all are equal
    group: str
    brief: bool  # among the most important
    about: str = ""  # formula


@dataclass(frozen=True)
class _Spec:
    label: str
    path: str  # dotted keys
    unit: str
    better: str = ""  # "high", "low" or ""
    brief: bool = False
    optional: bool = False  # left out if zero or nothing for all


def _latency(name: str, stats: Sequence[str], brief: Sequence[str] = ()) -> list[_Spec]:
    return [_Spec(f"{name} {stat}", f"{name}_ms.{stat}", "ms", "low", stat in brief, optional=True) for stat in stats]


_GROUPS: dict[str, list[_Spec]] = {
    "Requests": [
        _Spec("completed", "completed", "requests"),
        _Spec("rejected", "rejected", "requests", optional=True),
        _Spec("unfinished", "unfinished", "requests", optional=True),
        _Spec("cancelled", "cancelled", "requests", optional=True),
        _Spec("SLO attainment", "slo_attainment", "%", "high", brief=True, optional=True),
        _Spec("goodput", "goodput", "req/s", "high", brief=True, optional=True),
        _Spec("request throughput", "request_throughput", "req/s", "high"),
        _Spec("output throughput", "output_throughput", "tok/s", "high", brief=True),
        _Spec("duration", "duration_s", "s"),
    ],
    "Latency": [
        *_latency("ttft", ["p50", "p90", "p99"], ["p50", "p99"]),
        *_latency("norm_latency", ["p50", "p90", "p99"], ["p50", "p99"]),
        *_latency("e2el", ["p50", "p90", "p99"], ["p99"]),
        *_latency("tpot_chunk", ["p50", "p99"]),
        *_latency("tpot", ["p50", "p99"]),
        *_latency("itl", ["p50", "p99"]),
        *_latency("queue_time", ["p50", "p99"]),
    ],
    "Steps": [
        _Spec("batch mean", "batch.mean", "rows", brief=True),
        _Spec("chunk mean", "chunk.mean", "positions", brief=True),
        _Spec("step_latency p50", "step_latency_ms.p50", "ms"),
        _Spec("step_latency p99", "step_latency_ms.p99", "ms"),
        _Spec("tokens per forward", "tpf", "tok"),
        _Spec("token utilisation", "token_utilization", "%", brief=True),
        _Spec("computed a token", "computed_per_token", "positions", "low"),
        _Spec("tokens per emission", "tokens_per_emission", "tok"),
        _Spec("wasted canvas", "wasted_canvas_tokens", "tok", "low", optional=True),
        _Spec("busy", "busy_share", "%"),
        _Spec("time in prefill", "prefill_time_share", "%"),
        _Spec("KV utilisation", "kv_utilization", "%"),
        _Spec("preemptions", "preemptions", "requests", "low", optional=True),
        _Spec("prefix cache hits", "prefix_cache.hit_rate", "%", "high", optional=True),
    ],
}


def compare(policies: Sequence[Json]) -> list[MetricRow]:
    """For summaries (Summary.to_json()); a row has one unit."""
    rows = [_row(group, spec, policies) for group, specs in _GROUPS.items() for spec in specs]
    return [row for row in rows if row is not None] + _slo_rows(policies)


def number(value: float | None) -> str:
    """Three significant digits, an integer above 100; a dash for None or NaN."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    power = int(f"{value:.2e}".split("e")[1])  # after rounding: 99.95 is 100
    return f"{value:,.{max(0, 2 - power)}f}"


def _row(group: str, spec: _Spec, policies: Sequence[Json]) -> MetricRow | None:
    values = [value(policy, spec.path) for policy in policies]
    if spec.optional and not any(values):
        return None
    unit, scale = spec.unit, 1.0
    known = [v for v in values if v is not None]
    if unit == "ms" and known and max(known) >= 10_000:
        unit, scale = "s", 1e-3
    elif unit == "%":
        scale = 100.0
    shown = [None if v is None else v * scale for v in values]
    cells = tuple(_text(v, unit) for v in shown)
    about = METRICS[spec.path.split(".")[0].removesuffix("_ms")].formula
    return MetricRow(spec.label, unit, cells, _best(spec, values, policies), group, spec.brief, about)


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "requests":
        return f"{value:,.0f}"
    return f"{value:.1f}" if unit == "%" else number(value)


def _best(spec: _Spec, values: Sequence[float | None], policies: Sequence[Json]) -> frozenset[int]:
    # Latencies cover completed requests only: unfinished ones would flatter a policy.
    fair = [i for i, p in enumerate(policies) if not p.get("unfinished") and values[i] is not None]
    if not spec.better or len(fair) < 2:
        return frozenset()
    best = (max if spec.better == "high" else min)(values[i] or 0.0 for i in fair)
    winners = frozenset(i for i in fair if math.isclose(values[i] or 0.0, best, rel_tol=0.005, abs_tol=1e-12))
    return frozenset() if len(winners) == len(fair) else winners


def _slo_rows(policies: Sequence[Json]) -> list[MetricRow]:
    rows = []
    for k, slo in enumerate(policies[0].get("slos", []) if policies else []):
        cells, met, bound = [], set(), Slo.parse(slo["slo"])
        for i, policy in enumerate(policies):
            verdict = policy["slos"][k]
            share = "–" if verdict["attainment"] is None else f"{percent(verdict['attainment'], bound.share)} %"
            if verdict["met"] is None:
                cells.append(share)
            else:
                observed = verdict["observed_ms"]
                value = share if observed is None else f"{time_of(observed, bound.bound)} ms"
                cells.append(f"{value} {'met' if verdict['met'] else 'not met'}")
                met |= {i} if verdict["met"] else set()
        rows.append(MetricRow(slo["slo"], "", tuple(cells), frozenset(met), "SLOs", False, METRICS["slos"].formula))
    return rows


def time_of(milliseconds: float, bound: float) -> str:
    """A time in ms, with enough digits to show its side of the bound (s)."""
    return within(milliseconds, 1e3 * bound * ROUNDING, len(number(milliseconds).partition(".")[2]))


def value(summary: Mapping[str, Any], path: str) -> float | None:
    """By dotted keys, or None."""
    found: Any = summary
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return None if found is None else float(found)
