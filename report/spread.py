"""How 90th percentiles move with the spread between requests, as a part of a page."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..results.metrics import Columns, latencies
from .page import Row, Section, Table, Words
from .table import number

TITLE = "How P90 moves with the spread between requests"


def no_spread(why: str) -> dict[str, str]:
    """The entry of run.json where nothing was replayed."""
    return {"none": f"Nothing was replayed at other spreads between requests: {why}."}


def of_spread(found: Mapping[str, Any] | None, measured: Mapping[str, Columns] | None = None) -> tuple[Section, ...]:
    """A table of 90th percentiles at other spreads, or why there is none; nothing where nothing was asked.

    measured: by policy, the requests of a run that was no replay; the 90th percentiles of the same ones stand beside.
    """
    found = found or {}
    if "none" in found:
        return (Section(TITLE, (Words((str(found["none"]),)),)),)
    policies, measured = found.get("policies", []), measured or {}
    rows = tuple(
        Row((told.get("policy", ""), f"{name} p90, ms", *map(number, values), *_beside(measured, told, name)))
        for told in policies
        for name, values in told.get("p90_ms", {}).items()
    )
    if not rows:
        return ()
    widths = ", ".join(f"{number(told.get('spread'))} ({told.get('policy')})" for told in policies)
    replayed = dict.fromkeys((told.get("num_requests"), told.get("of")) for told in policies)
    of = " and ".join(f"{'all' if few == whole else f'the first {few} of'} {whole}" for few, whole in replayed)
    caption = (
        f"Replays of {of} requests{found.get('which', '')} at half, once and one and a half times the spread between "
        "requests, their mean yield kept. It is the standard deviation of the log-odds, or where a law says how many "
        f"forwards a block takes, of the logarithm of those: {widths}."
    )
    if measured:
        caption += " Measured are the same requests of the measured run, at whatever spread they had."
    head = ("policy", "metric", *(f"x {factor:g}" for factor in found.get("factors", [])))
    table = Table(head + (("measured",) if measured else ()), rows, caption=caption, left=frozenset({0, 1}))
    return (Section(TITLE, (table,), spoken=True),)


def _beside(measured: Mapping[str, Columns], told: Mapping[str, Any], metric: str) -> tuple[str, ...]:
    """The 90th percentile of the requests that were replayed, as they were measured."""
    if not measured:
        return ()
    columns = measured.get(told.get("policy", ""))
    values = None if columns is None else latencies(columns).get(metric)
    if columns is None or values is None:
        return ("",)
    known = values[(columns["request"] < told.get("num_requests", 0)) & ~np.isnan(values)]
    return (number(1e3 * float(np.percentile(known, 90))) if len(known) else "",)
