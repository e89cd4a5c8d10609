"""The page of `dsim plan`: fleet, cost, ranking, risks, deployment."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..results.spread import Spread
from .capacity import money, setup_facts
from .chart import COLOURS, Chart
from .ensemble import decided, of_ensemble
from .page import Block, Code, Figure, Number, Page, Section, Words, estimate, numbers, priced_apart, table
from .run import TIMES, log_words
from .table import counted, number, outward, percent, percent_span, places_of, time_of

if TYPE_CHECKING:
    from ..planner.plan_result import Fleet, Planned, Risk

VERDICTS = {"meets": "meets them", "misses": "misses them", "unsure": "too close to tell"}
HOURS = 24 * 365.25  # in a year
UNITS = (("days", 365.25, 0.05), ("weeks", 365.25 / 7, 0.25), ("months", 12.0, 3.0), ("years", 1.0, math.inf))


def plan_page(planned: "Planned") -> Page:
    best, setup = planned.recommended, planned.setup
    cautions = [estimate(setup.profile, "policies and fleets")] if setup.estimated else []
    if best.quality.relative is None:
        unknown = " ".join(best.quality.notes)
        cautions.append(
            ("Quality unknown.", f"There is no published score for the answers of {best.policy}: {unknown}.")
        )
    sections = (
        _over_time(planned) or _by_gpu(planned),
        _clients(planned),
        _ranking(planned),
        _settings(planned),
        _risks(planned),
        Section("To deploy", tuple(_deploy(planned)), spoken=True),
        *of_ensemble(planned.ensemble),
        _left_out(planned),
    )
    return Page(
        name=f"dsim plan: {setup.trace}",
        question="Which policy, on how many GPUs, at what cost?",
        answer=decided(answer(planned), planned.ensemble),
        details=_details(planned),
        cautions=tuple(cautions),
        numbers=_numbers(planned),
        chart=_costs(planned),
        facts=_facts(planned),
        sections=tuple(section for section in sections if section is not None),
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
    parts.append(f"{'meets' if best.gpus == 1 else 'meet'} the target for {_met(planned, best)}")
    low, high = _room_ends(best)
    room = f"no sure room for more traffic ({low} to {high} %)"
    parts.append(f"with room for {low} to {high} % more traffic" if low > 0 else f"with {room}")
    text = ", ".join(parts)
    if planned.deployment is None:
        text += "; no released engine is known to run this policy"
    if best.assumed >= 0.01:
        text += f"; {100 * best.assumed:.0f} % of its time is in large steps, whose cost is assumed, not published"
    text += priced_apart(fleet.implementation for fleet in planned.ranking)
    return "; ".join((text, *best.doubted, *best.untested)) + "."


def _details(planned: "Planned") -> tuple[str, ...]:
    """The setting, the runner-up, laws, growth and router."""
    best, slos = planned.recommended, []
    for slo in planned.setup.slos:
        slos.append(f"{slo.removeprefix('norm_latency=')}/token" if slo.startswith("norm_latency=") else slo)
    setting = f"{planned.rate:.4g} req/s within {' and '.join(slos)}: {best.policy} on {_fleet(best)}."
    if best.spare:
        setting += " The target is met without the spare."
    lines = [setting]
    if planned.measured is not None:
        lines.append(f"{log_words(planned.measured)}; the fleet's figures are predictions for other servers.")
    if planned.runner_up is not None:
        lines.append(f"Runner-up: {runner_up(planned, planned.runner_up)}.")
    lines += [_laws(planned), _lasting(planned)]
    return tuple(filter(None, lines))


def runner_up(planned: "Planned", second: "Fleet") -> str:
    """The runner-up, and why it lost."""
    best, setup = planned.recommended, planned.setup
    costs = planned.cost(second), planned.cost(best)
    if second.name in planned.tied:
        return f"{second.name}, at the same cost; these replays cannot tell it from the best"
    if math.isclose(*costs):
        if (second.quality.relative or 1.0) < (best.quality.relative or 0.0):
            gap = f"{second.quality} against {best.quality}"
            return f"{second.name}, at the same cost, but with answers of quality {gap}"
        gap = f"{_met(planned, second)} against {_met(planned, best)}"
        return f"{second.name}, at the same cost, but nearer to the SLOs' bounds ({gap})"
    if second.mean_cost is not None and planned.priced:
        second_cost, best_cost = (money(cost, setup) for cost in costs)
        return f"{second.name} costs {second_cost} an hour on average over the horizon, against {best_cost}"
    price = "" if second.per_hour is None else f", {money(second.per_hour, setup)} an hour"
    return f"{second.name} needs {_fleet(second)}{price}"


def _laws(planned: "Planned") -> str:
    """What the fleet would be under each counted law of canvases; empty if one is given."""
    if not planned.laws:
        return ""
    needs = []
    for law in planned.laws:
        gpus = "more GPUs than were allowed" if law.gpus is None else counted(law.gpus, "GPU")
        needs.append(f"with {law.forwards:.1f} ('{law.name}': {law.source.partition(':')[0]}) it needs {gpus}")
    return (
        f"The denoising steps of a canvas decide: {'; '.join(needs)}. Your server's counters "
        "vllm:diffusion_num_denoising_steps and ..._committed_tokens tell which is yours (--yield METRICS)."
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
    size = f"{counted(_bought(best), 'replica')} of {counted(best.gpus_per_replica, 'GPU')}"
    rows = [("GPUs", _gpus(best), size + (f", {best.spare} spare" if best.spare else ""))]
    if best.per_hour is not None:
        year = f"{money(planned.cost(best) * HOURS, setup, 0)} a year"
        tokens = f"{money(best.per_million_tokens or 0.0, setup)} for a million tokens of answers"
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
    return tuple((name, text) for name, text in facts.items() if text)


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
    size = f" of {fleet.gpus_per_replica}" if fleet.gpus_per_replica > 1 else ""
    spare = f" and {fleet.spare} spare" if fleet.spare else ""
    replicas = f" ({counted(_bought(fleet), 'replica')}{size}{spare})" if size or spare else ""
    return f"{fleet.gpus:,} {fleet.device}{replicas}"


def _bought(fleet: "Fleet") -> int:
    """Replicas that are paid, without the spare."""
    return (fleet.gpus or 0) // fleet.gpus_per_replica - fleet.spare


def _room(fleet: "Fleet") -> str:
    low, high = _room_ends(fleet)
    return "–" if fleet.headroom is None else f"{low} to {high} %"


def _room_ends(fleet: "Fleet") -> tuple[int, int]:
    """In percent, rounded outward."""
    room = fleet.headroom
    return (0, 0) if room is None else (math.floor(100 * room.low), math.ceil(100 * room.high))


def _met(planned: "Planned", fleet: "Fleet | Risk") -> str:
    """Criteria with intervals."""
    return ", ".join(_value(planned, fleet.judged, text, spread) for text, spread in fleet.values.items()) or "–"


def _value(planned: "Planned", judged: int, text: str, spread: Spread) -> str:
    """With its interval; if replications agree, with the number of requests."""
    value, low, high, bound = spread.value or 0.0, spread.low, spread.high, planned.bounds[text]
    if text not in planned.share_criteria:
        ends = ""
        if low is not None and high is not None:  # without draws the interval is empty
            ends = " in every replication" if low == high else f" ({number(1e3 * low)} to {number(1e3 * high)})"
        return f"{text.partition('=')[0]} {time_of(1e3 * value, bound)} ms{ends}"
    if value == 1:
        return f"100 % of {judged:,}" + ("" if low is None else f", at least {_floor(low)} %")
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
    return counted(months // 12, "year") if months % 12 == 0 else counted(months, "month")


# Tables


def _ranking(planned: "Planned") -> Section | None:
    rows = []
    for fleet in planned.ranking:
        binds = fleet.breaks_first
        if binds in planned.share_criteria and len(fleet.attained) > 1:  # of several SLOs that most requests miss
            binds = min(fleet.attained, key=lambda slo: fleet.attained[slo])
        rows.append({
            "policy": fleet.policy, "on": fleet.place, "GPUs": f"{fleet.gpus:,}", "an hour": _hourly(planned, fleet),
            "meet the SLOs": _met(planned, fleet), "headroom": _room(fleet),
            "binds first": "none: the queue grows" if binds == "stability" else binds,
            "limited by": ", ".join(filter(None, (fleet.limited_by, fleet.limiting_setting))),
            "quality": str(fleet.quality),
        })  # fmt: skip
    caption = (
        "Each policy's smallest fleet that surely meets the SLOs, the cheapest first; at equal cost by quality, then "
        "by distance from the bounds. In brackets: the 95 % interval over replications. Headroom: how much more "
        "traffic the fleet serves before it misses an SLO, as a 95 % interval. Binds first: the SLO that most "
        "requests miss. Quality: of answers, compared with the full cache."
    )
    words, spare = ("policy", "on", "binds first", "limited by"), ("quality", "limited by")
    return _section("The ranking", rows, caption, words, spare)


def _section(
    title: str, rows: Sequence[Mapping[str, str]], caption: str, words: Collection[str], spare: tuple[str, ...] = ()
) -> Section | None:
    """A table without empty columns; none without rows. words: columns of text."""
    if not rows:
        return None
    head = [name for name in rows[0] if any(row[name] for row in rows)]
    columns = frozenset(i for i, name in enumerate(head) if name in words)
    cells = [[row[name] for name in head] for row in rows]
    return Section(title, (table(head, cells, caption=caption, left=columns, spare=spare),), spoken=True)


def _hourly(planned: "Planned", fleet: "Fleet") -> str:
    return "" if fleet.per_hour is None or not planned.priced else money(fleet.per_hour, planned.setup)


def _left_out(planned: "Planned") -> Section | None:
    """One row for each reason."""
    names: dict[str, list[str]] = {}
    for fleet in planned.left_out:
        names.setdefault(fleet.dropped, []).append(fleet.name)
    rows = [{"left out": ", ".join(fleets), "why": reason} for reason, fleets in names.items()]
    return _section("Left out", rows, "", ("left out", "why"))


def _clients(planned: "Planned") -> Section | None:
    """Percentiles of the recommended fleet, and of the log."""
    best, log = planned.recommended, planned.measured
    latencies = {f"{best.policy} on {_fleet(best)}": dict(best.latency_ms)}
    if log is not None:
        latencies["measured in the log"] = {name: vars(getattr(log.summary, f"{name}_ms")) for name in TIMES}
    rows = []
    for metric in TIMES:
        for stat in ("p50", "p95", "p99") if best.latency_ms.get(metric) else ():
            times = [(latency.get(metric) or {}).get(stat) for latency in latencies.values()]
            rows.append([f"{metric} {stat}", *("–" if time is None else f"{number(time)} ms" for time in times)])
    records = [dict(zip(["", *latencies], row, strict=True)) for row in rows]
    return _section("What clients see", records, "One replay, at the plan's rate.", ("",))


def _settings(planned: "Planned") -> Section | None:
    rows = []
    for fleet in (*planned.ranking, *planned.left_out):
        tried = fleet.tried
        if tried is None:
            continue
        before = set(tried.given.split(",")[1:])
        changed = [setting for setting in tried.best.split(",")[1:] if setting not in before]
        rates = [f"{rate:.3g} req/s" if rate else "at no rate" for rate in (tried.given_rate, tried.rate)]
        rows.append({
            "policy": tried.given, "on": fleet.place, "settings tried": str(tried.num), "as given": rates[0],
            "best": ", ".join(changed) or "as given", "with it": rates[1],
            "gain": f"{100 * (tried.rate / tried.given_rate - 1):+.0f} %" if tried.given_rate else "–",
            "as good": str(tried.equal),
        })  # fmt: skip
    caption = (
        "The rate that one replica serves within the SLOs with the policy's given settings, and with the best settings "
        "of its engine, by replays of 1,600 requests: long enough to choose settings, too short to size a fleet. As "
        "good: other settings within 1 %; the one of fewest changes wins. Beyond what the engine is tested with, a "
        "setting must gain 10 %."
    )
    return _section("The engines' settings", rows, caption, ("policy", "on", "best"))


def _risks(planned: "Planned") -> Section | None:
    best = planned.recommended
    rows = []
    for risk in planned.risks:
        outcome = f"{_met(planned, risk) if risk.values else 'no replica is left'}, {VERDICTS[risk.verdict]}"
        if risk.values and not risk.stable:
            outcome += ": the queue grows without end"
        needs = "more than were allowed"
        if risk.needs is not None:
            needs = counted((risk.needs + best.spare) * best.gpus_per_replica, "GPU")
        if risk.per_hour is not None and planned.priced:
            needs += f", {money(risk.per_hour, planned.setup)} an hour"
        rows.append({
            "with": risk.change, f"{best.policy} as planned": outcome, "it then needs": needs,
        })  # fmt: skip
    without = ", without its spare (except for the lost replica)" if best.spare else ""
    caption = f"Of {best.policy} on {_fleet(best)}{without}."
    return _section("What could change it", rows, caption, {name for row in rows for name in row})


def _deploy(planned: "Planned") -> list[Block]:
    router, launch = planned.setup.router, planned.deployment
    intro = _loud(f"plan.toml, for every dsim command that takes a policy (planned with --router {router}):")
    blocks: list[Block] = [intro, Code(tuple(planned.plan_toml.splitlines()))]
    if launch is None:
        return [*blocks, _loud("No released engine is known to run this policy: the file is for dsim's own engine.")]
    times = "once" if launch.replicas == 1 else f"{launch.replicas} times, one for each replica"
    times += f" ({launch.spare} of them spare)" if launch.spare else ""
    replica = f"{launch.weights} weights, {counted(launch.gpus, 'GPU')} a replica"
    blocks += [_loud(f"{launch.engine} ({launch.image}), {replica}; {times}:"), Code((launch.shell,))]
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
    certainty: str
    gpus: float
    cost: float


def _offer(planned: "Planned", fleet: "Fleet") -> _Offer:
    if fleet in planned.ranking:
        return _Offer(fleet, "", fleet.gpus or 0, planned.cost(fleet))
    certainty, replicas = ("about ", fleet.about) if fleet.about is not None else ("at least ", fleet.least)
    gpus = math.inf if replicas is None else (replicas + planned.recommended.spare) * fleet.gpus_per_replica
    return _Offer(fleet, certainty, gpus, gpus * (fleet.price or 0.0) if planned.priced else gpus)


def _best_of_each(planned: "Planned") -> list[_Offer]:
    """Each GPU's cheapest fleet, those of the ranking first."""
    lost = sorted((_offer(planned, fleet) for fleet in planned.left_out), key=lambda offer: offer.cost)
    best: dict[str, _Offer] = {}
    for offer in (*(_offer(planned, fleet) for fleet in planned.ranking), *lost):
        best.setdefault(offer.fleet.device, offer)
    return list(best.values())


def _by_gpu(planned: "Planned") -> Section | None:
    """`_best_of_each` as a table; none for a single GPU."""
    offers = _best_of_each(planned)
    if len(offers) < 2:
        return None
    rows = []
    for offer in offers:
        fleet, count, hourly = offer.fleet, "–", "–"
        if offer.gpus < math.inf:
            count = f"{offer.certainty}{offer.gpus:,}"
            hourly = f"{offer.certainty}{money(offer.cost, planned.setup)}"
        rows.append({
            "GPU": fleet.device, "policy": fleet.policy, "GPUs": count, "an hour": hourly if planned.priced else "",
            "meet the SLOs": _met(planned, fleet), "left out": fleet.dropped,
        })  # fmt: skip
    caption = (
        "The cheapest fleet of each GPU that meets the SLOs. 'about': estimated by a short replay. 'at least': the "
        "search stopped there, because it knew two cheaper fleets."
    )
    return _section("The best of each GPU", rows, caption, ("GPU", "policy", "left out"), ("meet the SLOs",))


def _over_time(planned: "Planned") -> Section | None:
    """What each GPU's best fleet needs and costs as traffic grows; none without --growth."""
    growth, setup = planned.growth, planned.setup
    if growth is None:
        return None
    best: dict[str, Fleet] = {}
    for fleet in planned.ranking:
        best.setdefault(fleet.device, fleet)
    rows = []
    for fleet in best.values():
        row = {"": fleet.name}
        for due in fleet.due:
            date = f"after {_years(due.years)}" if due.years else "today"
            row[date] = f"{due.gpus}" + (f": {money(due.per_hour or 0.0, setup)}" if planned.priced else "")
        if planned.priced and fleet.headroom is not None:
            limit = planned.rate * (1 + fleet.headroom.value)
            row["in all"] = money((fleet.mean_cost or 0.0) * HOURS * growth.horizon, setup)
            row["an hour for each req/s at the limit"] = money((fleet.per_hour or 0.0) / limit, setup)
        rows.append(row)
    caption = (
        f"GPUs and cost an hour as traffic grows to {planned.recommended.due[-1].rate:.4g} req/s, each date by "
        f"replays at its rate, and bought when they are needed. The last column is today's fleet at its limit."
    )
    return _section("As traffic grows", rows, caption, ("",))


def _costs(planned: "Planned") -> Figure:
    """A bar for each GPU, or for each policy if there is one GPU."""
    offers, costs = _best_of_each(planned), {}
    is_one_gpu = len(offers) == 1
    for offer in [_offer(planned, fleet) for fleet in planned.ranking] if is_one_gpu else offers:
        fleet = offer.fleet
        label = f"{offer.certainty}{offer.gpus:,} × {fleet.device}" + (" today" if planned.growth else "")
        if is_one_gpu:
            label = f"{fleet.policy.replace(',', ',<br>')}<br>{label}"
        if offer.cost < math.inf:
            costs[f"{label}<br>{fleet.place}" if label in costs else label] = offer.cost
    names, paid = list(costs), list(costs.values())
    chart = Chart(height=34 + 20 * sum(2 + name.count("<br>") for name in names))
    chart.layout["margin"] |= {"b": 10}
    chart.add(
        "bar", x=paid, y=names, orientation="h", showlegend=False, cliponaxis=False, hoverinfo="skip",
        text=[f"{cost:,.2f}" if planned.priced else f"{cost:,.4g}" for cost in paid], textposition="outside",
        marker={"color": [COLOURS[0], *[COLOURS[-1]] * (len(names) - 1)]},
    )  # fmt: skip
    chart.y |= {"autorange": "reversed", "ticks": "", "ticklabelstandoff": 6, "showgrid": False}
    chart.x |= {"visible": False, "range": [0, 1.3 * max(paid)]}
    unit = f"{planned.setup.currency} an hour" if planned.priced else "GPUs"
    unit += ", mean over the horizon" if planned.growth else ""
    caption = f"{unit}, of the smallest fleet that meets the target at {planned.rate:.4g} req/s"
    title = "What it costs" if planned.priced else "GPUs"
    return Figure("costs", title, f"{caption}. Blue: the recommendation.", chart)
