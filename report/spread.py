"""How 90th percentiles move with the spread between requests, as a part of a run's page."""

from collections.abc import Mapping
from typing import Any

from .page import Row, Section, Table
from .table import number


def of_spread(found: Mapping[str, Any] | None) -> Section:
    """A table of 90th percentiles at other spreads; empty where nothing was asked."""
    if not found:
        return Section("How P90 moves with the spread between requests", ())
    factors = found.get("factors", [])
    rows = [
        Row((told.get("policy", ""), f"{name} p90, ms", *map(number, values)), group=told.get("policy", ""))
        for told in found.get("policies", [])
        for name, values in told.get("p90_ms", {}).items()
    ]
    widths = ", ".join(f"{number(told.get('spread'))} ({told.get('policy')})" for told in found.get("policies", []))
    of = "all" if found.get("num_requests") == found.get("of") else f"the first {found.get('num_requests')} of"
    caption = (
        f"Replays of {of} {found.get('of')} requests at half, once and one and a half times the commit model's spread, "
        f"its mean yield kept. The spread is the standard deviation of the log-odds between requests: {widths}."
    )
    head = ("policy", "metric", *(f"x {factor:g}" for factor in factors))
    table = Table(head, tuple(rows), caption=caption, left=frozenset({0, 1}))
    return Section("How P90 moves with the spread between requests", (table,) if rows else ())
