"""Times in a trace's log next to the predictions: sentence and table."""

from collections.abc import Mapping
from typing import Any

from .page import Section, table
from .table import counted, number, percent

Json = Mapping[str, Any]

TITLE = "Measured beside predicted"
TIMES = ("ttft", "e2el")
STATS = ("p50", "p90", "p99")


def verdict(measured: Json | None) -> tuple[str, ...]:
    """Prediction against log; empty without times."""
    if not measured:
        return ()
    policies = _policies(measured)
    if not policies:
        return (f"{_log(measured)}. This traffic is not the log's: its times do not test the prediction.",)
    furthest = ", ".join(f"{policy} {_furthest(measured, policy)}" for policy in policies)
    return (
        f"{_log(measured)}. Largest difference from it for the same requests: {furthest}; the prediction's error where "
        "the log's server ran that policy.",
    )


def of_plan(measured: Json | None) -> tuple[str, ...]:
    """The log beside a plan; empty without times."""
    return (f"{_log(measured)}; the fleet's figures are predictions for other servers.",) if measured else ()


def sections(measured: Json | None) -> tuple[Section, ...]:
    """One row per statistic: measured, and each policy's prediction."""
    if not measured:
        return ()
    policies = _policies(measured)
    if not policies:
        return ()
    rows = []
    for row in measured["beside"]:
        pairs = [row["measured_predicted_ms"].get(policy) for policy in policies]
        known = next((pair for pair in pairs if pair), None)
        if known is not None:
            cells = [_cell(pair) for pair in pairs]
            rows.append((f"{row['metric']} {row['stat']}", f"{number(known[0])} ms", *cells))
    head = ("", "measured", *policies)
    counts = {row["metric"]: f"{row['metric']} of {row['num']:,}" for row in measured["beside"]}
    about = f"Both sides: {', '.join(counts.values())} of {measured['of']:,} requests, which have it in the log."
    return (Section(TITLE, (table(head, rows, caption=about),), spoken=True),)


def _policies(measured: Json) -> list[str]:
    return list(dict.fromkeys(policy for row in measured["beside"] for policy in row["measured_predicted_ms"]))


def _log(measured: Json) -> str:
    summary, parts = measured["summary"], []
    for name in TIMES:
        times = summary[f"{name}_ms"]
        if times["p50"] is not None:
            parts.append(f"{name} p50 {number(times['p50'])} ms, p99 {number(times['p99'])} ms")
    rate = "" if measured["rate"] is None else f" at {number(measured['rate'])} req/s"
    text = f"The log measured{rate} {'; '.join(parts)}"
    if (attained := summary["slo_attainment"]) is not None:
        failed = f", {measured['failed']:,} of which failed" if measured["failed"] else ""
        num = measured["requests"] + measured["failed"]
        text += f" and met the SLOs for {percent(attained, None)} % of {counted(num, 'request')}{failed}"
    return text


def _furthest(measured: Json, policy: str) -> str:
    """The largest difference."""
    found = [
        (pair[1] / pair[0] - 1, f"{row['metric']} {row['stat']}")
        for row in measured["beside"]
        if (pair := row["measured_predicted_ms"].get(policy)) and pair[0] > 0
    ]
    if not found:
        return "has none of these times"
    off, where = max(found, key=lambda item: abs(item[0]))
    return f"{off:+.1%} ({where})".replace("%", " %")


def _cell(pair: list[float] | None) -> str:
    if pair is None:
        return "–"
    off = "" if pair[0] <= 0 else f" ({pair[1] / pair[0] - 1:+.1%})".replace("%", " %")
    return f"{number(pair[1])} ms{off}"
