"""Policies compared: numbers, units, the best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..results.metrics import METRICS, ROUNDING, path
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


def compare(policies: Sequence[Json]) -> list[MetricRow]:
    """For summaries (Summary.to_json()); a row has one unit."""
    rows = [_row(name, stat, policies) for name, metric in METRICS.items() if metric.group for stat in metric.stats]
    return [row for row in rows if row is not None] + _slo_rows(policies)


def number(value: float | None) -> str:
    """Three significant digits, an integer above 100; a dash for None or NaN."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    power = int(f"{value:.2e}".split("e")[1])  # after rounding: 99.95 is 100
    return f"{value:,.{max(0, 2 - power)}f}"


def _row(name: str, stat: str, policies: Sequence[Json]) -> MetricRow | None:
    metric = METRICS[name]
    values = [value(policy, path(name, stat)) for policy in policies]
    if metric.optional and not any(values):
        return None
    unit, scale = metric.unit, 1.0
    known = [v for v in values if v is not None]
    if unit == "ms" and known and max(known) >= 10_000:
        unit, scale = "s", 1e-3
    elif unit == "share":
        unit, scale = "%", 100.0
    shown = [None if v is None else v * scale for v in values]
    cells = tuple(_text(v, unit) for v in shown)
    label, best = (
        metric.label or (f"{name} {stat}" if stat else name.replace("_", " ")),
        _best(metric.better, values, policies),
    )
    return MetricRow(label, unit, cells, best, metric.group, stat in metric.brief, metric.formula)


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "requests":
        return f"{value:,.0f}"
    return f"{value:.1f}" if unit == "%" else number(value)


def _best(better: str, values: Sequence[float | None], policies: Sequence[Json]) -> frozenset[int]:
    # Latencies cover completed requests only: unfinished ones would flatter a policy.
    fair = [i for i, p in enumerate(policies) if not p.get("unfinished") and values[i] is not None]
    if not better or len(fair) < 2:
        return frozenset()
    best = (max if better == "high" else min)(values[i] or 0.0 for i in fair)
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


def value(summary: Mapping[str, Any], keys: str) -> float | None:
    """By dotted keys, or None."""
    found: Any = summary
    for key in keys.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return None if found is None else float(found)
