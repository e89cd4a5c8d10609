"""A capacity in words and as a table: how much a fleet sustains, what binds, and the latency-rate curve."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files.place import Kind, check_folder, has_keys, write_folder
from .table import number

FILES = ("capacity.json", "report.html")
CAPACITY = Kind("a capacity", FILES, FILES[0], has_keys("rate", "replicas", "binding_slo", "curve"))
Json = Mapping[str, Any]  # what `dsim capacity --json` prints
BARS = "▁▂▃▄▅▆▇█"


def answer(found: Json) -> str:
    """The capacity in one sentence."""
    fleet = _fleet(found["replicas"])
    sure = f"{span(found['rate'])} at {100 * found['confidence']:g}% confidence"
    if found["asked_rate"] is not None:
        return f"{found['asked_rate']:g} req/s needs {fleet}, which sustain{_s(found['replicas'])} {sure}"
    return f"{found['policy']} sustains {sure} on {fleet}"


def span(rate: Json) -> str:
    """An interval with the digits that it deserves: `5.28 req/s (5.16 to 5.41)`."""
    value, low, high = rate["value"], rate["low"], rate["high"]
    if high is None:
        return f"about {value:.2g} req/s"
    places = max(0, 1 - math.floor(math.log10((high - low) / 2))) if high > low else 4
    return f"{value:,.{places}f} req/s ({low:,.{places}f} to {high:,.{places}f})"


def warnings(found: Json) -> list[str]:
    """What a reader must know before the number."""
    lines = []
    if found["interrupted"]:
        lines.append(f"INTERRUPTED: this is what {len(found['replications'])} replications say")
    elif found["rate"]["high"] is None or _half(found["rate"]) > found["precision"]:
        lines.append(
            f"WIDE: the interval is ±{100 * _half(found['rate']):.2g}% after {len(found['replications'])} "
            f"replications, {100 * found['precision']:g}% was asked: allow more, or give --num-requests more"
        )
    if found["rejected"] > 0:
        lines.append(f"REJECTED: {100 * found['rejected']:.2g}% of requests can never fit and are no load")
    return lines


def facts(found: Json) -> list[tuple[str, str]]:
    """What the capacity rests on, as (name, value)."""
    lines = []
    if found["one_fewer"] is not None:
        lines.append(("One replica less", f"sustains {span(found['one_fewer'])}, which is too little or unsure"))
    if found["binding_slo"] == "stability":
        binding = "none: the queue grows without end first"
    else:
        binding = found["binding_slo"]
    lines.append(("Binding SLO", f"{binding} (in {100 * found['binding_share']:.0f}% of replications)"))
    if found["shares"]:
        shares = ", ".join(f"{name} {100 * share:.0f}%" for name, share in found["shares"].items() if share >= 0.005)
        setting = f", {found['limiting_setting']}" if found["limiting_setting"] else ""
        lines.append(("Limited by", f"{found['limited_by']}{setting} (of the busy time: {shares})"))
    if found["cost"] is not None:
        cost = found["cost"]
        lines.append(
            (
                "Cost",
                f"{cost['per_hour']:,.2f} an hour for {cost['gpus']} GPU{_es(cost['gpus'])}, "
                f"{cost['per_million_requests']:,.2f} per million requests",
            )
        )
    verdict = ": estimated, not measured" if found["estimated"] else ""
    lines.append(("Profile", found["profile"] + verdict))
    lines.append(
        (
            "Search",
            f"{found['num_replays']} replays of {found['num_requests']:,} requests, {len(found['replications'])} "
            f"replications, resampled {found['block']:,} requests at a time",
        )
    )
    return lines


def curve_rows(found: Json) -> tuple[list[str], list[list[str]]]:
    """The latency-rate curve as a table: its head and its rows."""
    names = list(found["bounds"])
    head = ["req/s", *names, "", ""]
    top = {name: max((p["values"][name] or 0.0 for p in found["curve"]), default=0.0) or 1.0 for name in names}
    rows = []
    for point in found["curve"]:
        first = point["values"][names[0]] or 0.0
        bar = BARS[min(len(BARS) - 1, int(first / top[names[0]] * len(BARS)))]
        verdict = "meets all" if point["holds"] else "violated" if point["stable"] else "unstable"
        rows.append(
            [number(point["rate"]), *(_shown(found, name, point["values"][name]) for name in names), bar, verdict]
        )
    return head, rows


def write(folder: str | Path, found: Json, *, force: bool = False) -> None:
    """Write capacity.json and report.html; the same capacity gives the same bytes."""
    # Imported here: an answer on the terminal draws nothing and need not load Plotly.
    from .capacity_page import page

    text = json.dumps(found, indent=2, allow_nan=False, ensure_ascii=False)
    write_folder(folder, CAPACITY, {FILES[0]: text + "\n", FILES[1]: page(found)}, force=force)


def check(folder: str | Path, *, force: bool = False) -> Path:
    """The folder, if it may be written to."""
    return check_folder(folder, CAPACITY, force=force)


def is_share(found: Json, name: str) -> bool:
    """Whether a bound is on a share of arrivals rather than on a time."""
    return name in found["share_criteria"]


def _shown(found: Json, name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f}%" if is_share(found, name) else f"{number(value)} ms"


def _half(rate: Json) -> float:
    return math.inf if rate["high"] is None else (rate["high"] - rate["low"]) / (2 * rate["value"])


def _fleet(replicas: int) -> str:
    return f"{replicas} replica{_es(replicas)}"


def _es(count: int) -> str:
    return "" if count == 1 else "s"


def _s(count: int) -> str:
    return "s" if count == 1 else ""
