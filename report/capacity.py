"""The page of `dsim capacity`: the sustained rate, its limit, the latency-rate curve."""

import math

from ..files.place import has_keys
from ..results.metrics import ROUNDING
from .chart import Chart, colour
from .ensemble import decided, of_ensemble
from .page import Figure, Number, Page, Section, Table, estimate, table
from .search import Json, money
from .search import facts as search_facts
from .table import counted, number, outward, percent, places_of, within

FILES = ("capacity.json", "report.html")
IS_CAPACITY = has_keys("rate", "replicas", "binding_slo", "curve")
CURVE_REPLICATIONS = 2  # a rate from CURVE_NEAR on; one below
CURVE_NEAR = 0.9  # of the capacity
MOST_SHOWN = 2.5  # times its bound
CLIFF = 0.25  # of the capacity, which a bound of 10 % more or less moves at a cliff


def answer(found: Json) -> str:
    count = found["replicas"]
    fleet = counted(count, "replica")
    sure = f"{span(found['rate'])} at {100 * found['confidence']:g}% confidence"
    if pools := found["pools"]:
        fleet += f" ({', '.join('{replicas} of {name}'.format_map(pool) for pool in pools)})"
    sustained = f"{found['policy']} sustains {sure} on {fleet}"
    if found["asked_rate"] is not None:
        sustained = f"{found['asked_rate']:g} req/s needs {fleet}, which sustain{'s' if count == 1 else ''} {sure}"
    return "; ".join((sustained, *found["doubted"]))


def span(rate: Json) -> str:
    """To two digits of the half-width, ends rounded outward: `5.28 req/s (5.16 to 5.41)`."""
    value, low, high = rate["value"], rate["low"], rate["high"]
    if high is None:
        return f"about {number(value)} req/s"
    places = places_of((high - low) / 2) if high > low else 4
    ends = f"{outward(low, places):,.{places}f} to {outward(high, places, up=True):,.{places}f}"
    return f"{value:,.{places}f} req/s ({ends})"


def warnings(found: Json) -> list[str]:
    """Shown before the number."""
    lines = []
    if found["interrupted"]:
        lines.append(f"INTERRUPTED: this is what {len(found['replications'])} replications say")
    elif found["rate"]["high"] is None or _half(found["rate"]) > found["precision"]:
        lines.append(
            f"WIDE: the interval is ±{number(100 * _half(found['rate']))}% after {len(found['replications'])} "
            f"replications, but {100 * found['precision']:g}% was asked for: allow more --num-requests"
        )
    if found["rejected"] > 0:
        lines.append(f"REJECTED: {percent(found['rejected'])}% of requests can never fit and cause no load")
    return lines


def facts(found: Json) -> list[tuple[str, str]]:
    """(name, value)."""
    less, cost, limit, binds = found["one_fewer"], found["cost"], found["limited_by"], found["binds"] or "no pool"
    binding = found["binding_slo"] if found["binding_slo"] != "stability" else "none: the queue grows without end first"
    shares = ", ".join(f"{name} {100 * share:.0f}%" for name, share in found["shares"].items() if share >= 0.005)
    setting = f", {found['limiting_setting']}" if found["limiting_setting"] else ""
    held = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in found["memory"].items())
    at = {name: known for name, known in found["latency_ms"].items() if known is not None}
    seen = "; ".join(f"median {n} {number(ms['p50'])} ms, p90 {number(ms['p90'])} ms" for n, ms in at.items())
    about = search_facts(found)
    shown = {
        "Trace": found.get("traffic"),
        "SLOs": ", ".join(found["bounds"]),
        "One replica less": less and f"sustains {span(less)}: too little, or not certainly enough",
        "Binding SLO": f"{binding} (in {100 * found['binding_share']:.0f}% of replications)",
        "The bound stands at a cliff": _cliff(found),
        "Limited by": found["shares"] and f"{limit}{setting} (of the busy time: {shares})",
        "What binds": found["shares"] and f"{binds}; the memory of a replica is {held}",
        "At capacity": seen,
        "Cost": cost
        and f"{money(cost['per_hour'], found)} an hour for {counted(cost['gpus'], 'GPU')}, "
        f"{money(cost['per_million_tokens'], found)} for a million tokens of answers",
        **{name: about[name] for name in ("Workload", "Front end", "Profile")},
        "Search": f"{found['num_replays']} replays of {found['num_requests']:,} requests, "
        f"{len(found['replications'])} replications, resampled {found['block']:,} requests at a time",
    }
    return [(name, text) for name, text in shown.items() if text]


def _cliff(found: Json) -> str:
    """The capacity at the bounds 10 % either side; empty if both are near it."""
    others = found["other_bounds"]
    if all(abs(other["rate"] / found["rate"]["value"] - 1) <= CLIFF for other in others):
        return ""
    return ", ".join(f"{other['side']} {number(other['rate'])} req/s at {other['slo']}".strip() for other in others)


def capacity_page(found: Json) -> Page:
    return Page(
        name=f"dsim: capacity of {found['policy']}",
        question="How much traffic meets the SLOs?",
        answer=decided(answer(found), found),
        alarms=tuple(warnings(found)),
        cautions=(estimate(found["profile"], "rates"),) if found["estimated"] else (),
        numbers=_numbers(found),
        chart=_distance(found) if found["curve"] else None,
        facts=tuple(facts(found)),
        sections=(
            *((Section("Pools", (_pools(found),), spoken=True),) if found["pools"] else ()),
            *((Section("The curve in numbers", (_table(found),)),) if found["curve"] else ()),
            *of_ensemble(found),
        ),
        notes=tuple(found.get("notes", ())),
        command=found.get("command", ""),
        version=found.get("dsim", ""),
    )


def _numbers(found: Json) -> tuple[Number, ...]:
    rate, at = found["rate"], found["latency_ms"]
    value, _, within = span(rate).partition(" (")
    sure = ""
    if rate["high"] is not None:
        sure = f"{within[:-1]}, {100 * found['confidence']:g} % sure"
    numbers = [Number("capacity", ((None, value),), sure)]
    if found["cost"] is not None:
        cost = money(found["cost"]["per_million_tokens"], found)
        hourly = f"{money(found['cost']['per_hour'], found)} an hour"
        numbers.append(Number("a million tokens", ((None, cost),), hourly))
    for name, what in (("ttft", "to the first token"), ("tpot_chunk", "a token after the first emission")):
        if at.get(name) is not None:
            shown, median = f"{number(at[name]['p90'])} ms", f"{what}; median {number(at[name]['p50'])} ms"
            numbers.append(Number(f"{name} p90 at capacity", ((None, shown),), median))
    numbers.append(Number("replicas", ((None, f"{found['replicas']:,}"),), "behind one router"))
    return tuple(numbers[:4])


def _pools(found: Json) -> Table:
    """Replicas, load, and the effect of one replica less."""
    rows = []
    for pool in found["pools"]:
        setting = f", {pool['limiting_setting']}" if pool["limiting_setting"] else ""
        less = ", ".join(f"{name.partition('=')[0] if not is_share(found, name) else ''} {_shown(found, name, value)}"
                         for name, value in pool["one_less"].items()).strip()  # fmt: skip
        rows.append([
            pool["name"], f"{pool['replicas']:,}", f"{pool['gpus']:,}", f"{100 * pool['busy']:.0f}%",
            f"{pool['limited_by']}{setting}", less or "–", pool["policy"], pool["profile"],
        ])  # fmt: skip
    caption = (
        "At the capacity. Busy: the share of time in which its replicas run steps. One less: what a fleet with one "
        "replica less of the pool does at the rate asked for, the mean of its replays."
    )
    head = ["pool", "replicas", "GPUs", "busy", "limited by", "one less", "policy", "profile"]
    return table(head, rows, caption=caption, left=frozenset({0, 4, 6, 7}), spare=("profile", "policy"))


def _table(found: Json) -> Table:
    names = list(found["bounds"])
    rows = []
    for point in found["curve"]:
        shown = (_shown(found, name, point["values"][name]) for name in names)
        rows.append([_rate(found, point["rate"]), *shown, _verdict(found, point)])
    for point in found.get("measured", []):
        values = (_shown(found, name, point["values"].get(name)) for name in names)
        rows.append([number(point["rate"]), *values, f"measured: {point['run']}"])
    caption = (
        f"Means of {CURVE_REPLICATIONS} replications at rates from {100 * CURVE_NEAR:g}% of the capacity, and one "
        "replication below. "
        "meets all: every SLO holds; at the limit: the rate is within the capacity's interval, so that it may be below "
        "or above the capacity; unstable: the queue grows. The interval is of all replications: if the curve's "
        "disagree with it, the verdict says so."
    )
    return table(["req/s", *names, ""], rows, caption=caption, left=frozenset())


def _rate(found: Json, rate: float) -> str:
    """With enough digits to compare it with the capacity's interval."""
    shown, ends = number(rate), found["rate"]
    places = len(shown.partition(".")[2])
    if ends["high"] is None:
        return shown
    return max((within(rate, ends[end], places) for end in ("low", "high")), key=len)


def _verdict(found: Json, point: Json) -> str:
    """Whether a rate meets the SLOs, by its replays and the capacity's interval."""
    rate = found["rate"]
    if rate["low"] <= point["rate"] <= (rate["value"] if rate["high"] is None else rate["high"]):
        return "at the limit"
    # It has fewer replications than the interval.
    if point["rate"] < rate["low"] and not point["holds"]:
        return "missed in its replays"
    if point["holds"]:
        return "meets all" if point["rate"] < rate["low"] else "met in its replays"
    if not point["stable"]:
        return "unstable"
    beyond = (_used(found, name, point["values"][name]) for name in found["bounds"])
    return "violated" if any(used is None or used > ROUNDING for used in beyond) else "violated in some"


def _distance(found: Json) -> Figure:
    """The share of its bound that each metric uses."""
    chart = Chart("requests per second", "of what the SLO allows", legend=True)
    chart.layout["legend"] = {"orientation": "h", "y": -0.3}
    measured = found.get("measured", [])
    top = 1.2
    for i, name in enumerate(found["bounds"]):
        curve = [(p, used) for p in found["curve"] if (used := _used(found, name, p["values"][name])) is not None]
        top = max([top, *(used for _, used in curve)])
        chart.line(
            [p["rate"] for p, _ in curve], [used for _, used in curve], name, i, mode="lines+markers",
            marker={"symbol": ["circle" if p["stable"] else "x" for p, _ in curve], "size": 8},
            hover=f"%{{y:.0%}} of {name} at %{{x:.3~g}} req/s<extra></extra>",
        )  # fmt: skip
        if runs := [(p, used) for p in measured if (used := _used(found, name, p["values"].get(name))) is not None]:
            chart.line(
                [p["rate"] for p, _ in runs], [used for _, used in runs], f"{name}, measured", i, mode="markers",
                text=[p["run"] for p, _ in runs], marker={"symbol": "diamond", "size": 10, "color": colour(i)},
                hover="%{y:.0%} at %{x:.3~g} req/s, %{text}",
            )  # fmt: skip
    chart.hline(1.0, "the bound")
    rate, asked = found["rate"], found["asked_rate"]
    if rate["high"] is not None:
        chart.band(rate["low"], rate["high"])
    if asked is None:
        chart.vline(rate["value"], "capacity", "solid")
    else:  # labels must not overlap
        sides = ("left", "right") if asked <= rate["value"] else ("right", "left")
        chart.vline(rate["value"], "capacity", "solid", sides[0])
        chart.vline(asked, "asked", "dot", sides[1])
    # Far above, a metric shows the replay's length only.
    chart.y |= {"tickformat": ".0%", "range": [0, min(1.05 * top, MOST_SHOWN)]}
    caption = (
        "The share of its bound that each metric uses at each rate; for a share of requests, the share of the misses "
        "that it allows. Solid: the capacity, shaded: its interval"
        + ("." if asked is None else ", dotted: the rate asked for.")
    )
    if found["binding_slo"] == "stability":
        caption += " The queue grows without end before an SLO binds."
    if measured:
        caption += " Diamonds: measured runs."
    if not all(p["stable"] for p in found["curve"]):
        caption += " ✕: the queue grows without end."
    return Figure("distance", "How near the SLOs are", caption, chart)


def _used(found: Json, name: str, value: float | None) -> float | None:
    """None without a value, or if the bound allows no miss."""
    bound = found["bounds"][name]
    if value is None:
        return None
    if not is_share(found, name):
        return float(value / bound)
    return (1 - value) / (1 - bound) if bound < 1 else None


def is_share(found: Json, name: str) -> bool:
    """A bound on a share of arrivals, not on a time."""
    return name in found["share_criteria"]


def _shown(found: Json, name: str, value: float | None) -> str:
    if value is None:
        return "–"
    bound = found["bounds"][name]
    if is_share(found, name):
        return f"{percent(value, bound)}%"
    shown = number(value)
    return f"{within(value, bound * ROUNDING, len(shown.partition('.')[2]))} ms"


def _half(rate: Json) -> float:
    return math.inf if rate["high"] is None else (rate["high"] - rate["low"]) / (2 * rate["value"])
