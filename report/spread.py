"""How 90th percentiles move with the spread between requests, as a part of a page."""

from collections.abc import Mapping
from typing import Any

from .page import Row, Section, Table
from .table import number

TITLE = "How P90 moves with the spread between requests"


def of_spread(found: Mapping[str, Any] | None) -> tuple[Section, ...]:
    """A table of 90th percentiles at other spreads; nothing where nothing was asked."""
    policies = (found or {}).get("policies", [])
    rows = tuple(
        Row((told.get("policy", ""), f"{name} p90, ms", *map(number, values)), group=told.get("policy", ""))
        for told in policies
        for name, values in told.get("p90_ms", {}).items()
    )
    if not found or not rows:
        return ()
    widths = ", ".join(f"{number(told.get('spread'))} ({told.get('policy')})" for told in policies)
    replayed = dict.fromkeys((told.get("num_requests"), told.get("of")) for told in policies)
    of = " and ".join(f"{'all' if few == whole else f'the first {few} of'} {whole}" for few, whole in replayed)
    caption = (
        f"Replays of {of} requests{found.get('which', '')} at half, once and one and a half times the commit model's "
        "spread, its mean yield kept. The spread is the standard deviation of the log-odds between requests: "
        f"{widths}."
    )
    head = ("policy", "metric", *(f"x {factor:g}" for factor in found.get("factors", [])))
    return (Section(TITLE, (Table(head, rows, caption=caption, left=frozenset({0, 1})),)),)
