"""p90 at other spreads between requests."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..results.metrics import Columns, latencies, statistic
from .page import Row, Section, Table, Words
from .table import number

TITLE = "How P90 moves with the spread between requests"


def no_spread(why: str) -> dict[str, str]:
    """For run.json, if nothing was replayed."""
    return {"none": f"Nothing was replayed at other spreads between requests: {why}."}


def of_spread(found: Mapping[str, Any] | None, measured: Mapping[str, Columns] | None = None) -> tuple[Section, ...]:
    """A table, or why there is none; empty without --spread.

    measured: requests of a measured run by policy, for another column.
    """
    found = found or {}
    if "none" in found:
        return (Section(TITLE, (Words((str(found["none"]),)),)),)
    policies, measured = found.get("policies", []), measured or {}
    rows = tuple(
        Row((own.get("policy", ""), f"{name} p90, ms", *map(number, values), *_measured(measured, own, name)))
        for own in policies
        for name, values in own.get("p90_ms", {}).items()
    )
    if not rows:
        return ()
    widths = ", ".join(f"{number(own.get('spread'))} ({own.get('policy')})" for own in policies)
    replayed = dict.fromkeys((own.get("num_requests"), own.get("of")) for own in policies)
    of = " and ".join(f"{'all' if few == whole else f'the first {few} of'} {whole}" for few, whole in replayed)
    caption = (
        f"Replays of {of} requests{found.get('which', '')} at 0.5, 1 and 1.5 times the spread between requests, with "
        "the same mean yield. The spread is the standard deviation of the log-odds, or under a law of the number of "
        f"forwards, of its logarithm: {widths}."
    )
    if measured:
        caption += " The column 'measured' has the same requests of the measured run, at their own spread."
    head = ("policy", "metric", *(f"x {factor:g}" for factor in found.get("factors", [])))
    table = Table(head + (("measured",) if measured else ()), rows, caption=caption, left=frozenset({0, 1}))
    return (Section(TITLE, (table,), spoken=True),)


def _measured(measured: Mapping[str, Columns], own: Mapping[str, Any], metric: str) -> tuple[str, ...]:
    if not measured:
        return ()
    columns = measured.get(own.get("policy", ""))
    values = None if columns is None else latencies(columns).get(metric)
    if columns is None or values is None:
        return ("",)
    known = values[(columns["request"] < own.get("num_requests", 0)) & ~np.isnan(values)]
    return (number(1e3 * statistic(known, "p90")) if len(known) else "",)
