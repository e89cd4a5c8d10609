"""The page of `dsim plan`: fleet, cost, ranking, risks, deployment."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..results.spread import Spread
from .capacity_page import money, setup_facts
from .chart import COLOURS, Chart
from .ensemble_page import decided, of_ensemble
from .page import (
    Block,
    Code,
    Figure,
    Number,
    Page,
    Section,
    Words,
    estimate,
    facts_of,
    numbers,
    priced_apart,
    table,
    table_of,
)
from .table import counted, joined, number, outward, percent, percent_span, places_of, time_of

if TYPE_CHECKING:
    from ..planner.plan_result import Fleet, Planned, Risk

VERDICTS = {"meets": "meets them", "misses": "misses them", "unsure": "too close to tell"}
STATS = ("p50", "p95", "p99")
HOURS = 24 * 365.25  # in a year
UNITS = (("days", 365.25, 0.05), ("weeks", 365.25 / 7, 0.25), ("months", 12.0, 3.0), ("years", 1.0, math.inf))


def plan_page(planned: "Planned") -> Page:
    best, setup = planned.recommended, planned.setup
    cautions = []
    if setup.estimated:
        cautions.append(estimate(setup.profile, "policies and fleets"))
    if best.quality.relative is None:
        cautions.append(("Quality unknown.", f"{best.policy}: {' '.join(best.quality.notes)}."))
    sections = (
        _over_time(planned),
        _by_gpu(planned),
        _clients(planned),
        _today(planned),
        _ranking(planned),
        _research(planned),
        _risks(planned),
        Section("To deploy", tuple(_deploy(planned)), spoken=True),
        *of_ensemble(planned.ensemble),
        _left_out(planned),
    )
    return Page(
        name=f"dsim plan: {setup.trace}",
        question="Which policy, on how many GPUs, at what cost?",
        answer=decided(answer(planned), planned.ensemble),
        details=tuple(filter(None, _details(planned))),
        cautions=tuple(cautions),
        numbers=_numbers(planned),
        chart=_costs(planned),
        facts=_facts(planned),
        sections=tuple(section for section in sections if section.blocks),
        notes=(*_notes(planned), *planned.notes),
        command=setup.command,
        version=setup.dsim,
    )


def answer(planned: "Planned") -> str:
    """For the buyer: GPUs, price, attainment, headroom, and what makes them doubtful."""
    best, setup = planned.recommended, planned.setup
    parts = [_gpus(best)]
    if best.per_hour is not None:
        parts += [f"{money(best.per_hour, setup)} an hour", f"{money(best.per_hour * HOURS / 12, setup, 0)} a month"]
    parts.append("meet" + "s" * (best.gpus == 1) + f" the target for {_met(planned, best)}")
    room = f"with no sure room for more traffic ({_room(best)})"
    if best.headroom is not None and best.headroom.low >= 0.01:
        room = f"with room for {_room(best)} more traffic"
    text = ", ".join((*parts, room))
    if planned.deployment is None:
        text += "; no released engine is known to run this policy"
    if best.assumed >= 0.01:
        text += f"; {100 * best.assumed:.0f} % of its time is in large steps, whose cost is assumed, not published"
    text += priced_apart(fleet.implementation for fleet in planned.ranking)
    return "; ".join((text, *best.doubted, *best.untested)) + "."


def _details(planned: "Planned") -> list[str]:
    """The setting, the runner-up, laws, growth and router; empty texts are left out."""
    best, slos = planned.recommended, " and ".join(planned.setup.slos)
    lines = [f"{planned.rate:.4g} req/s within {slos}: {best.policy} on {_fleet(best)}."]
    if best.spare:
        lines[0] += " The target is met without the spare."
    if planned.runner_up is not None:
        lines.append(f"Runner-up: {runner_up(planned, planned.runner_up)}.")
    return [*lines, _laws(planned), _lasting(planned), _routed(planned)]


def runner_up(planned: "Planned", second: "Fleet") -> str:
    """The runner-up, and why it lost."""
    best, setup = planned.recommended, planned.setup
    costs = planned.cost(second), planned.cost(best)
    if second.name in planned.tied:
        return f"{second.name}, at the same cost; these replays cannot tell it from the best"
    if math.isclose(*costs):
        sides = [f"{_met(planned, fleet)}, quality {fleet.quality}" for fleet in (second, best)]
        return f"{second.name}, at the same cost: {' against '.join(sides)}"
    if not planned.priced:
        return f"{second.name} needs {_fleet(second)}"
    prices = [f"{money(cost, setup)} an hour" for cost in costs]
    return f"{second.name} needs {_fleet(second)}, {' against '.join(prices)}"


def _laws(planned: "Planned") -> str:
    """What the fleet would be under each counted law of canvases; empty if one is given."""
    needs = []
    for law in planned.laws:
        gpus = counted(law.gpus, "GPU") if law.gpus is not None else "more GPUs than were allowed"
        needs.append(f"with {law.forwards:.1f} ('{law.name}': {law.source.partition(':')[0]}) it needs {gpus}")
    if not needs:
        return ""
    return (
        f"The denoising steps of a canvas decide: {'; '.join(needs)}. Your server's counters of denoising steps and "
        "committed tokens tell which is yours (--yield METRICS)."
    )


def _routed(planned: "Planned") -> str:
    """What a router that knows the queues would save; empty if nothing."""
    routed = planned.routed
    if routed is None or routed.replicas == planned.recommended.replicas:
        return ""
    price = f", {money(routed.per_hour, planned.setup)} an hour," * planned.priced
    return (
        f"Requests go to a replica at random, as without a router; behind {routed.name} "
        f"{counted(routed.gpus or 0, 'GPU')}{price} would do (--router {routed.name})."
    )


def _lasting(planned: "Planned") -> str:
    """How long the fleet lasts; empty without --growth."""
    growth, cost = planned.growth, planned.recommended.mean_cost
    if growth is None:
        return ""
    outlook = "there is no room to grow"
    if growth.high > 0:
        unit, of_year = next((unit, of_year) for unit, of_year, end in UNITS if (growth.low or growth.high) < end)
        outlook = f"it runs out after {math.floor(growth.low * of_year)} to {math.ceil(growth.high * of_year)} {unit}"
    if planned.priced and cost is not None:
        outlook += f"; over {_years(growth.horizon)} it costs {money(cost * HOURS * growth.horizon, planned.setup)}"
    return f"If traffic grows by {100 * growth.share:g} % a {growth.per}, {outlook}."


def _numbers(planned: "Planned") -> tuple[Number, ...]:
    best, setup = planned.recommended, planned.setup
    rows = [("GPUs", _gpus(best), _fleet(best))]
    if best.per_hour is not None:
        year = f"{money(planned.cost(best) * HOURS, setup, 0)} a year"
        tokens = f"{money(best.per_million_tokens, setup)} for a million tokens of answers"
        rows.append(("an hour", money(best.per_hour, setup), f"{year}; {tokens}"))
    rows += [("within the target", _met(planned, best), f"{text}; 95 % sure") for text in [*best.values][:1]]
    rows.append(("room for more traffic", _room(best), "until the target is missed; 95 % sure"))
    return numbers([*rows, ("quality", str(best.quality), "of answers, compared with the full cache")])


def _facts(planned: "Planned") -> tuple[tuple[str, str], ...]:
    setup = planned.setup
    facts = {"Trace": f"{setup.traffic}, at {planned.rate:.4g} req/s", "SLOs": ", ".join(planned.criteria)}
    if planned.priced:
        fleets = (*planned.ranking, *planned.left_out)
        prices = dict.fromkeys(f"{fleet.device} {fleet.price or 0.0:g}" for fleet in fleets)
        facts["Price"] = f"{', '.join(prices)} {setup.currency} for a GPU's hour"
    search = f"{planned.num_replays} replays, most of {planned.num_requests:,} requests, resampled {planned.block:,}"
    facts |= {**setup_facts(setup), "Router": setup.router, "Search": f"{search} at a time; seed {setup.seed}"}
    return facts_of(facts)


def _notes(planned: "Planned") -> list[str]:
    notes, quality = [], planned.recommended.quality
    if quality.relative is None:
        notes.append(f"the quality of the recommended policy is unknown: {' '.join(quality.notes)}")
    if planned.tied:
        tied = ", ".join(planned.tied)
        notes.append(f"as good as the recommendation, within the precision of these replays: {tied}")
    if not planned.priced:
        notes.append("without --gpu-hour, fleets are ranked by number of GPUs, regardless of their kind")
    return notes


# A fleet in words


def _gpus(fleet: "Fleet") -> str:
    return f"{fleet.gpus:,} × {fleet.device}"


def _fleet(fleet: "Fleet") -> str:
    parts = [f"{fleet.gpus:,} {fleet.device}"]
    if fleet.gpus_per_replica > 1:
        parts.append(f"{fleet.gpus_per_replica} a replica")
    if fleet.spare:
        parts.append(f"{counted(fleet.spare, 'replica')} spare")
    return ", ".join(parts)


def _room(fleet: "Fleet") -> str:
    """In percent, rounded outward."""
    if fleet.headroom is None:
        return "–"
    return f"{math.floor(100 * fleet.headroom.low)} to {math.ceil(100 * fleet.headroom.high)} %"


def _met(planned: "Planned", fleet: "Fleet | Risk") -> str:
    """Criteria with intervals."""
    return ", ".join(_value(planned, fleet.judged, text, spread) for text, spread in fleet.values.items()) or "–"


def _value(planned: "Planned", judged: int, text: str, spread: Spread) -> str:
    """With its interval; if replications agree, with the number of requests."""
    value, low, high, bound = spread.value or 0.0, spread.low, spread.high, planned.bounds[text]
    if text not in planned.share_criteria:
        time = f"{text.partition('=')[0]} {time_of(1e3 * value, bound)} ms"
        if low is None or high is None:  # without draws the interval is empty
            return time
        if low == high:
            return f"{time} in every replication"
        return f"{time} ({number(1e3 * low)} to {number(1e3 * high)})"
    if value == 1:
        least = f", at least {_floor(low or 0.0)} %" * (low is not None)
        return f"100 % of {judged:,}{least}"
    if low is None or high is None:
        return f"{percent(value, bound)} %"
    return percent_span(value, low, high, bound)


def _floor(share: float) -> str:
    """In percent, down to the first digit of its distance from 100."""
    if not 0 < share < 1:
        return f"{100 * share:g}"
    places = max(0, places_of(100 * (1 - share)) - 1)
    return f"{outward(100 * share, places):.{places}f}"


def _years(years: float) -> str:
    months = round(12 * years)
    return counted(months, "month") if months % 12 else counted(months // 12, "year")


# Tables


def _section(title: str, rows: Sequence[Mapping[str, str]], caption: str, words: Collection[str]) -> Section:
    """A table; no blocks without rows. words: columns of text."""
    if not rows:
        return Section(title, ())
    return Section(title, (table_of(rows, caption, words),), spoken=True)


def _ranking(planned: "Planned") -> Section:
    rows = []
    for fleet in planned.ranking:
        binds = fleet.breaks_first
        if binds in planned.share_criteria and len(fleet.attained) > 1:  # of several SLOs that most requests miss
            binds = min(fleet.attained, key=lambda slo: fleet.attained[slo])
        rows.append(
            {
                "policy": fleet.policy,
                "on": fleet.place,
                "GPUs": f"{fleet.gpus:,}",
                "an hour": _hourly(planned, fleet),
                "meet the SLOs": _met(planned, fleet),
                "headroom": _room(fleet),
                "binds first": {"stability": "none: the queue grows"}.get(binds, binds),
                "limited by": joined(fleet.limited_by, fleet.limiting_setting),
                "quality": str(fleet.quality),
            }
        )
    caption = (
        "Each policy's smallest fleet that surely meets the SLOs, the cheapest first; at equal cost by quality, then "
        "by distance from the bounds. In brackets: the 95 % interval over replications. Headroom: how much more "
        "traffic the fleet serves before it misses an SLO, as a 95 % interval. Binds first: the SLO that most "
        "requests miss. Quality: of answers, compared with the full cache."
    )
    return _section("The ranking", rows, caption, ("policy", "on", "binds first", "limited by"))


def _research(planned: "Planned") -> Section:
    """What schedulers of no engine would save; nothing without --research."""
    rows = []
    for fleet in planned.research:
        share = 100 * (1 - planned.cost(fleet) / planned.cost(planned.recommended))
        row = {"policy": fleet.name, "GPUs": f"{fleet.gpus:,}", "an hour": _hourly(planned, fleet)}
        rows.append({**row, "saves": f"{max(share, 0.0):.0f} %"})
    caption = "Schedulers that no released engine has: what it would be worth to build one."
    return _section("What a new scheduler would save", rows, caption, ("policy",))


def _hourly(planned: "Planned", fleet: "Fleet") -> str:
    return "" if not planned.priced else money(fleet.per_hour, planned.setup)


def _left_out(planned: "Planned") -> Section:
    """One row for each reason."""
    names: dict[str, list[str]] = {}
    for fleet in planned.left_out:
        names.setdefault(fleet.dropped, []).append(fleet.name)
    rows = [{"left out": ", ".join(fleets), "why": reason} for reason, fleets in names.items()]
    return _section("Left out", rows, "", ("left out", "why"))


def _clients(planned: "Planned") -> Section:
    """Percentiles of the recommended fleet."""
    rows = []
    for metric, percentiles in planned.recommended.latency_ms.items():
        if percentiles is not None:
            rows.append({"ms": metric} | {stat: number(percentiles[stat]) for stat in STATS})
    return _section("What clients see", rows, "One replay, at the plan's rate.", ("ms",))


def _today(planned: "Planned") -> Section:
    """What runs today beside the recommendation; nothing without --today."""
    rows: dict[str, dict[str, str]] = {}
    for column, fleet in {"as planned": planned.recommended, "today": planned.today}.items():
        if planned.today is None or fleet is None:
            continue
        of_fleet = {"fleet": f"{fleet.policy} on {_fleet(fleet)}", "an hour": _hourly(planned, fleet)}
        of_fleet["meet the SLOs"] = _met(planned, fleet)
        for metric in ("ttft", "e2el"):
            percentiles = fleet.latency_ms.get(metric) or {}
            of_fleet |= {f"{metric} {stat}, ms": number(percentiles[stat]) for stat in STATS if stat in percentiles}
        for name, text in of_fleet.items():
            rows.setdefault(name, {"": name, "as planned": "–", "today": "–"})[column] = text or "–"
    caption = "Replayed at the plan's rate on the recommended GPUs; times are of one replay."
    return _section("What runs today", [*rows.values()], caption, ("",))


def _risks(planned: "Planned") -> Section:
    best = planned.recommended
    rows = []
    for risk in planned.risks:
        outcome = f"{_met(planned, risk)}, {VERDICTS[risk.verdict]}"
        if not risk.stable:
            outcome += ": the queue grows without end"
        needs = "more than were allowed"
        if risk.needs is not None:
            needs = counted((risk.needs + best.spare) * best.gpus_per_replica, "GPU")
        if risk.per_hour is not None and planned.priced:
            needs += f", {money(risk.per_hour, planned.setup)} an hour"
        rows.append({"with": risk.change, f"{best.policy} as planned": outcome, "it then needs": needs})
    caption = f"Of {best.policy} on {_fleet(best)}; only the lost replica's row has a spare."
    return _section("What could change it", rows, caption, {name for row in rows for name in row})


def _over_time(planned: "Planned") -> Section:
    """What each GPU's best fleet needs and costs as traffic grows; nothing without --growth."""
    growth, setup = planned.growth, planned.setup
    best: dict[str, Fleet] = {}
    for fleet in planned.ranking:
        best.setdefault(fleet.device, fleet)
    rows = []
    for fleet in best.values():
        row = {"": fleet.name}
        for due in fleet.due:
            date = f"after {_years(due.years)}" if due.years else "today"
            row[date] = ": ".join(filter(None, (f"{due.gpus}", money(due.per_hour, setup))))
        if growth is not None and planned.priced:
            row["in all"] = money((fleet.mean_cost or 0.0) * HOURS * growth.horizon, setup)
            rows.append(row)
    caption = (
        "GPUs and cost an hour as traffic grows, each date by replays at its rate; the sum is with GPUs bought when "
        "they are needed."
    )
    return _section("As traffic grows", rows, caption, ("",))


def _deploy(planned: "Planned") -> list[Block]:
    router, launch = planned.setup.router, planned.deployment
    intro = _loud(f"plan.toml, for every dsim command that takes a policy (planned with --router {router}):")
    blocks: list[Block] = [intro, Code(tuple(planned.plan_toml.splitlines()))]
    if launch is None:
        return [*blocks, _loud("No released engine is known to run this policy: the file is for dsim's own engine.")]
    size = f"{launch.weights} weights, {counted(launch.gpus, 'GPU')} a replica; {counted(launch.replicas, 'replica')}"
    blocks += [_loud(f"{launch.engine} ({launch.image}), {size}, {launch.spare} of them spare:"), Code(launch.start)]
    if launch.config:
        fields = tuple(f"{name}: {value}" for name, value in launch.config.items())
        blocks += [_loud("  with a file dllm.yaml of"), Code(fields, indent="    ")]
    if launch.differs:
        about, head = "All else is the release's default.", ["differs from the default", "why"]
        blocks.append(table(head, [*launch.differs.items()], caption=about, left=frozenset({0, 1})))
    return [*blocks, _loud(*(f"No flag sets: {text}." for text in launch.unset))]


def _loud(*lines: str) -> Words:
    return Words(lines, loud=True)


# The best fleet of each GPU


@dataclass(frozen=True)
class _Offer:
    """A fleet with its size, perhaps estimated; infinite: unknown."""

    fleet: "Fleet"
    certainty: str = ""
    gpus: float = math.inf
    cost: float = math.inf


def _offer(planned: "Planned", fleet: "Fleet") -> _Offer:
    if fleet.gpus is not None:
        return _Offer(fleet, "", fleet.gpus, planned.cost(fleet))
    price = fleet.price or 0.0 if planned.priced else 1.0
    for certainty, replicas in {"about ": fleet.about, "at least ": fleet.least}.items():
        if replicas is not None:
            gpus = (replicas + planned.recommended.spare) * fleet.gpus_per_replica
            return _Offer(fleet, certainty, gpus, gpus * price)
    return _Offer(fleet)


def _best_of_each(planned: "Planned") -> list[_Offer]:
    """Each GPU's cheapest fleet, those of the ranking first."""
    ranked, lost = ([_offer(planned, fleet) for fleet in fleets] for fleets in (planned.ranking, planned.left_out))
    best: dict[str, _Offer] = {}
    for offer in (*ranked, *sorted(lost, key=lambda offer: offer.cost)):
        best.setdefault(offer.fleet.device, offer)
    return list(best.values())


def _by_gpu(planned: "Planned") -> Section:
    """`_best_of_each` as a table; nothing for a single GPU."""
    rows, offers = [], _best_of_each(planned)
    for offer in offers * (len(offers) > 1):
        fleet, count, hourly = offer.fleet, "–", "–"
        if offer.gpus < math.inf:
            count, hourly = f"{offer.certainty}{offer.gpus:,}", f"{offer.certainty}{money(offer.cost, planned.setup)}"
        row = {"GPU": fleet.device, "policy": fleet.policy, "GPUs": count, "an hour": hourly * planned.priced}
        rows.append({**row, "meet the SLOs": _met(planned, fleet), "left out": fleet.dropped})
    caption = (
        "The cheapest fleet of each GPU that meets the SLOs. 'about': estimated by a short replay. 'at least': the "
        "search stopped there, because it knew two cheaper fleets."
    )
    return _section("The best of each GPU", rows, caption, ("GPU", "policy", "left out"))


def _costs(planned: "Planned") -> Figure:
    """A bar for each GPU, or for each policy if there is one GPU."""
    costs, offers = {}, _best_of_each(planned)
    one_gpu = len(offers) == 1
    if one_gpu:
        offers = [_offer(planned, fleet) for fleet in planned.ranking]
    for offer in offers:
        policy = f"{offer.fleet.name}<br>".replace(",", ",<br>") * one_gpu
        if offer.cost < math.inf:
            costs[f"{policy}{offer.certainty}{offer.gpus:,} × {offer.fleet.device}"] = offer.cost
    names, paid = list(costs), list(costs.values())
    chart = Chart(height=34 + 20 * sum(2 + name.count("<br>") for name in names))
    chart.layout["margin"] |= {"b": 10}
    chart.add(
        "bar",
        x=paid,
        y=names,
        orientation="h",
        showlegend=False,
        cliponaxis=False,
        hoverinfo="skip",
        text=[f"{cost:,.2f}" for cost in paid],
        textposition="outside",
        marker={"color": [COLOURS[0], *[COLOURS[-1]] * (len(names) - 1)]},
    )
    chart.y |= {"autorange": "reversed", "ticks": "", "ticklabelstandoff": 6, "showgrid": False}
    chart.x |= {"visible": False, "range": [0, 1.3 * max(paid)]}
    unit = f"{planned.setup.currency} an hour" if planned.priced else "GPUs"
    if planned.growth is not None:
        unit += ", mean over the horizon"
    caption = f"{unit}, of the smallest fleet that meets the target at {planned.rate:.4g} req/s"
    return Figure("costs", "What it costs", f"{caption}. Blue: the recommendation.", chart)
