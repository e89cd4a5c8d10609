"""Policies compared: numbers, units, the best. Digits stay on their side of a bound; intervals are rounded outward."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..results.metrics import METRICS, ROUNDING, SloVerdict, Summary, path
from ..results.slo import Slo
from .page import Row

MOST_PLACES = 9


def compare(policies: Sequence[Summary]) -> list[Row]:
    """The policies' numbers: label, unit, and a cell for each policy."""
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


def _row(name: str, stat: str, policies: Sequence[Summary]) -> Row | None:
    metric = METRICS[name]
    values = [value(policy, path(name, stat)) for policy in policies]
    if metric.optional and not any(values):
        return None
    unit, scale = metric.unit, 1.0
    if unit == "ms" and max((v for v in values if v is not None), default=0.0) >= 10_000:
        unit, scale = "s", 1e-3
    elif unit == "share":
        unit, scale = "%", 100.0
    label = metric.label or f"{name} {stat}".strip()
    if not stat:
        label = label.replace("_", " ")
    cells = (label, unit, *(_text(v, scale, unit) for v in values))
    return Row(cells, _best(metric.better, values, policies), metric.group, metric.formula)


def _text(value: float | None, scale: float, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "requests":
        return f"{value:,.0f}"
    if unit == "%":
        return f"{scale * value:.1f}"
    return number(scale * value)


def _best(better: str, values: Sequence[float | None], policies: Sequence[Summary]) -> frozenset[int]:
    # Latencies cover completed requests only: unfinished ones would flatter a policy.
    fair = {2 + i: v for i, v in enumerate(values) if v is not None and not policies[i].unfinished}
    if not better or len(fair) < 2:
        return frozenset()
    best = {"high": max, "low": min}[better](fair.values())
    winners = frozenset(i for i, v in fair.items() if math.isclose(v, best, rel_tol=0.005, abs_tol=1e-12))
    return frozenset() if len(winners) == len(fair) else winners


def _slo_rows(policies: Sequence[Summary]) -> list[Row]:
    rows = []
    for verdicts in zip(*(policy.slos for policy in policies), strict=True):
        met = frozenset(2 + i for i, verdict in enumerate(verdicts) if verdict.met)
        cells = (verdicts[0].slo, "", *map(_verdict, verdicts))
        rows.append(Row(cells, met, group="SLOs", about=METRICS["slos"].formula))
    return rows


def _verdict(verdict: SloVerdict) -> str:
    slo, text = Slo.parse(verdict.slo), "–"
    if verdict.attainment is not None:
        text = f"{percent(verdict.attainment, slo.share)} %"
    if verdict.observed_ms is not None:
        text = f"{time_of(verdict.observed_ms, slo.bound)} ms"
    return text + {None: "", True: " met", False: " not met"}[verdict.met]


def time_of(milliseconds: float, bound: float) -> str:
    """A time in ms, with enough digits to show its side of the bound (s)."""
    return within(milliseconds, 1e3 * bound * ROUNDING, len(number(milliseconds).partition(".")[2]))


def value(summary: Summary, keys: str) -> float | None:
    """By dotted keys, or None."""
    number: Any = summary
    for key in keys.split("."):
        number = getattr(number, key, None)
    return None if number is None else float(number)


def counted(count: int, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def joined(*texts: str) -> str:
    """The texts that are not empty."""
    return ", ".join(filter(None, texts))


def within(value: float, bound: float, places: int) -> str:
    """At least `places` decimals, and enough to show whether it exceeds the bound."""
    places = _enough(places, lambda n: (round(value, n) > bound) == (value > bound))
    return f"{value:,.{places}f}"


def percent(share: float, least: float | None = None) -> str:
    """At least one decimal; reads 100, 0 or below `least` only if it is."""
    value = 100 * share
    if share in (0.0, 1.0):
        return f"{value:.0f}"
    sides = (100.0, 100 * (least or 1.0) * (1 - 1e-12))
    places = _enough(1, lambda n: round(value, n) > 0 and all((round(value, n) >= s) == (value >= s) for s in sides))
    return f"{value:.{places}f}"


def percent_span(share: float, low: float, high: float, least: float | None = None) -> str:
    """Rounded outward: `99.4 % (99.2 to 99.6)`."""
    side = 100 * least * (1 - 1e-12) if least is not None and low >= least else 0.0
    places = _enough(1, lambda n: outward(100 * low, n) >= side)  # rounding must not move the end below
    ends = [outward(100 * low, places), outward(100 * high, places, up=True)]
    texts = [f"{end:.{places * (end not in (0, 100))}f}" for end in ends]
    return f"{percent(share, least)} % ({' to '.join(texts)})"


def _enough(places: int, agrees: Callable[[int], bool]) -> int:
    """The fewest decimals, from `places` on, that agree with the value."""
    return next((n for n in range(places, MOST_PLACES) if agrees(n)), MOST_PLACES)


def plus_minus(value: float, half: float) -> str:
    """To two digits of the half-width: `5.28 ± 0.13`, `880 ± 120`."""
    if not half > 0:
        return f"{value:.4g}"
    places = places_of(half)
    return f"{value:,.{places}f} ± {half:,.{places}f}"


def places_of(half: float) -> int:
    """For two digits of a half-width."""
    return max(0, 1 - math.floor(math.log10(half)))


def outward(value: float, places: int, *, up: bool = False) -> float:
    scaled = round(value * 10**places, 6)
    rounded = math.ceil(scaled) if up else math.floor(scaled)
    return float(rounded) / float(10**places)
