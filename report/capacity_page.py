"""The page of `dsim capacity`: the sustained rate, its limit, the latency-rate curve."""

from typing import TYPE_CHECKING

from ..results.metrics import ROUNDING
from ..results.world import Setup
from .chart import Chart
from .page import Figure, Number, Page, Section, Table, estimate, facts_of, numbers, table
from .run_page import front_end
from .table import counted, joined, number, outward, percent, places_of, within

if TYPE_CHECKING:
    from ..planner.capacity import Capacity, Point
    from ..planner.replicate import Interval

CURVE_REPLICATIONS = 2  # a rate from CURVE_NEAR on; one below
CURVE_NEAR = 0.9  # of the capacity
CLIFF = 0.25  # of the capacity, which a bound of 10 % more or less moves at a cliff
MOST_SHOWN = 2.5  # times its bound
CLIENTS = {"ttft": "to the first token", "tpot_chunk": "a token after the first emission"}


def capacity_page(capacity: "Capacity") -> Page:
    setup, sections, cautions, chart = capacity.setup, [], [], None
    if capacity.pools:
        sections.append(Section("Pools", (_pools(capacity),), spoken=True))
    if capacity.curve:
        sections.append(Section("The curve in numbers", (_table(capacity),)))
        chart = _distance(capacity)
    if setup.estimated:
        cautions.append(estimate(setup.profile, "rates"))
    return Page(
        name=f"dsim: capacity of {capacity.policy}",
        question="How much traffic meets the SLOs?",
        answer=_answer(capacity),
        alarms=tuple(_alarms(capacity)),
        cautions=tuple(cautions),
        numbers=_numbers(capacity),
        chart=chart,
        facts=_facts(capacity),
        sections=tuple(sections),
        notes=capacity.notes,
        command=setup.command,
        version=setup.dsim,
    )


def _answer(capacity: "Capacity") -> str:
    fleet = counted(capacity.replicas, "replica")
    if capacity.pools:
        fleet += f" ({', '.join(f'{pool.replicas} of {pool.name}' for pool in capacity.pools)})"
    sure = f"{span(capacity.rate)} at {100 * capacity.confidence:g}% confidence"
    answer = f"{capacity.policy} sustains {sure} on {fleet}"
    if capacity.target is not None:
        sustain = "sustain" + "s" * (capacity.replicas == 1)
        answer = f"{capacity.target:g} req/s needs {fleet}, which {sustain} {sure}"
    return "; ".join((answer, *capacity.doubted))


def span(rate: "Interval") -> str:
    """To two digits of the half-width, ends rounded outward: `5.28 req/s (5.16 to 5.41)`."""
    places = places_of((rate.high - rate.low) / 2) if rate.high > rate.low else 4
    low, high = outward(rate.low, places), outward(rate.high, places, up=True)
    return f"{rate.value:,.{places}f} req/s ({low:,.{places}f} to {high:,.{places}f})"


def _alarms(capacity: "Capacity") -> list[str]:
    lines, num, half_width = [], len(capacity.replications), capacity.rate.half_width
    if half_width > capacity.precision:
        lines.append(
            f"WIDE: the interval is ±{number(100 * half_width)}% after {num} replications, but "
            f"{100 * capacity.precision:g}% was asked for: allow more --num-requests"
        )
    if capacity.rejected > 0:
        lines.append(f"REJECTED: {percent(capacity.rejected)}% of requests can never fit and cause no load")
    return lines


def _facts(capacity: "Capacity") -> tuple[tuple[str, str], ...]:
    setup, binding = capacity.setup, capacity.binding_slo
    facts = {"Trace": setup.traffic, "SLOs": ", ".join(capacity.bounds)}
    if binding == "stability":
        binding = "none: the queue grows without end first"
    facts["Binding SLO"] = f"{binding} (in {100 * capacity.binding_share:.0f}% of replications)"
    facts["The bound stands at a cliff"] = _cliff(capacity)
    shares = ", ".join(f"{name} {100 * share:.0f}%" for name, share in capacity.shares.items() if share >= 0.005)
    limit = joined(capacity.limited_by, capacity.limiting_setting)
    facts["Limited by"] = f"{limit} (of the busy time: {shares})"
    percentiles = [(name, ms) for name, ms in capacity.latency_ms.items() if ms is not None]
    facts["At capacity"] = "; ".join(
        f"median {name} {number(ms['p50'])} ms, p90 {number(ms['p90'])} ms" for name, ms in percentiles
    )
    replays = f"{capacity.num_replays} replays of {capacity.num_requests:,} requests"
    resampled = f"resampled {capacity.block:,} requests at a time"
    facts |= setup_facts(setup)
    facts["Search"] = f"{replays}, {len(capacity.replications)} replications, {resampled}"
    return facts_of(facts)


def _cliff(capacity: "Capacity") -> str:
    """The capacity at the bounds 10 % either side; empty if both are near it."""
    bounds = capacity.other_bounds
    if all(abs(bound.rate / capacity.rate.value - 1) <= CLIFF for bound in bounds):
        return ""
    return ", ".join(f"{bound.side} {number(bound.rate)} req/s at {bound.slo}".strip() for bound in bounds)


def setup_facts(setup: Setup) -> dict[str, str]:
    """Empty if there is none."""
    return {
        "Workload": setup.workload or "",
        "Front end": front_end(setup.frontend),
        "Profile": setup.profile + ": estimated, not measured" * setup.estimated,
    }


def money(amount: float | None, setup: Setup, places: int = 2) -> str:
    """Empty for None."""
    return "" if amount is None else f"{amount:,.{places}f} {setup.currency}"


def _numbers(capacity: "Capacity") -> tuple[Number, ...]:
    value, _, ends = span(capacity.rate).partition(" (")
    rows = [("capacity", value, f"{ends[:-1]}, {100 * capacity.confidence:g} % sure")]
    for name, about in CLIENTS.items():
        ms = capacity.latency_ms.get(name)
        if ms is not None:
            median = f"{about}; median {number(ms['p50'])} ms"
            rows.append((f"{name} p90 at capacity", f"{number(ms['p90'])} ms", median))
    return numbers([*rows, ("replicas", f"{capacity.replicas:,}", "behind one router")])


def _pools(capacity: "Capacity") -> Table:
    """Replicas and load."""
    rows = []
    for pool in capacity.pools:
        size = [pool.name, f"{pool.replicas:,}", f"{pool.gpus:,}", f"{100 * pool.busy:.0f}%"]
        rows.append([*size, joined(pool.limited_by, pool.limiting_setting), pool.policy, pool.profile])
    caption = "At the capacity. Busy: the share of time in which its replicas run steps."
    head = ["pool", "replicas", "GPUs", "busy", "limited by", "policy", "profile"]
    return table(head, rows, caption=caption, left=frozenset({0, 4, 5, 6}))


def _table(capacity: "Capacity") -> Table:
    rows = []
    for point in capacity.curve:
        cells = [_value(capacity, name, point.values.get(name)) for name in capacity.bounds]
        rows.append([_rate(capacity.rate, point.rate), *cells, _verdict(capacity, point)])
    caption = (
        f"Means of {CURVE_REPLICATIONS} replications at rates from {100 * CURVE_NEAR:g}% of the capacity, and one "
        "replication below. "
        "meets all: every SLO holds; at the limit: the rate is within the capacity's interval, so that it may be below "
        "or above the capacity; unstable: the queue grows. The interval is of all replications: if the curve's "
        "disagree with it, the verdict says so."
    )
    return table(["req/s", *capacity.bounds, ""], rows, caption=caption, left=frozenset())


def _rate(interval: "Interval", rate: float) -> str:
    """With enough digits to compare it with the capacity's interval."""
    places = len(number(rate).partition(".")[2])
    return max((within(rate, end, places) for end in (interval.low, interval.high)), key=len)


def _verdict(capacity: "Capacity", point: "Point") -> str:
    """Whether a rate meets the SLOs, by its replays and the capacity's interval."""
    if capacity.rate.low <= point.rate <= capacity.rate.high:
        return "at the limit"
    # It has fewer replications than the interval.
    if point.rate < capacity.rate.low:
        return {True: "meets all", False: "missed in its replays"}[point.holds]
    if point.holds:
        return "met in its replays"
    if not point.stable:
        return "unstable"
    shares = [_used(capacity, name, point.values[name]) for name in capacity.bounds]
    if any(used is None or used > ROUNDING for used in shares):
        return "violated"
    return "violated in some"


def _distance(capacity: "Capacity") -> Figure:
    """The share of its bound that each metric uses."""
    chart = Chart("requests per second", "of what the SLO allows", legend=True)
    caption = (
        "The share of its bound that each metric uses at each rate; for a share of requests, the share of the misses "
        "that it allows. Solid: the capacity, shaded: its interval, dotted: a rate asked for. ✕: the queue grows "
        "without end."
    )
    top = 1.2
    for i, name in enumerate(capacity.bounds):
        points = [(point, _used(capacity, name, point.values[name])) for point in capacity.curve]
        drawn = [(point, used) for point, used in points if used is not None]
        symbols = [{True: "circle", False: "x"}[point.stable] for point, _ in drawn]
        top = max([top, *(used for _, used in drawn)])
        chart.line(
            [point.rate for point, _ in drawn],
            [used for _, used in drawn],
            name,
            i,
            mode="lines+markers",
            marker={"symbol": symbols, "size": 8},
            hover=f"%{{y:.0%}} of {name} at %{{x:.3~g}} req/s<extra></extra>",
        )
    chart.hline(1.0, "the bound")
    chart.band(capacity.rate.low, capacity.rate.high)
    side = "center"
    if capacity.target is not None:  # labels must not overlap
        side, other = sorted(("left", "right"), reverse=capacity.target > capacity.rate.value)
        chart.vline(capacity.target, "asked", "dot", other)
    chart.vline(capacity.rate.value, "capacity", "solid", side)
    # Far above, a metric shows the replay's length only.
    chart.y |= {"tickformat": ".0%", "range": [0, min(1.05 * top, MOST_SHOWN)]}
    return Figure("distance", "How near the SLOs are", caption, chart)


def _used(capacity: "Capacity", name: str, value: float | None) -> float | None:
    """None without a value, or if the bound allows no miss."""
    bound = capacity.bounds[name]
    if value is None:
        return None
    if name not in capacity.share_criteria:
        return value / bound
    if bound == 1:
        return None
    return (1 - value) / (1 - bound)


def _value(capacity: "Capacity", name: str, value: float | None) -> str:
    if value is None:
        return "–"
    bound = capacity.bounds[name]
    if name in capacity.share_criteria:
        return f"{percent(value, bound)}%"
    return f"{within(value, bound * ROUNDING, len(number(value).partition('.')[2]))} ms"
