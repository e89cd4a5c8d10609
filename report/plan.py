"""The page of `dsim plan`: fleet, cost, ranking, risks, deployment."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..results.spread import uncertain_of
from . import measured
from .chart import COLOURS, Chart
from .digits import counted, percent
from .ensemble import decided, of_ensemble
from .fleet import bought, cost_of, floor_of, gpus_of, met_share, name_of
from .page import Block, Code, Figure, Number, Page, Section, Table, Words, priced_apart, table
from .purchase import HOURS, best_of_each, by_gpu, cost, estimated_gpus, grown, lasting, over_time
from .search import Json, cautions, facts, in_currency, money, quality, quality_number
from .table import number, time_of

VERDICTS = {"meets": "meets them", "misses": "misses them", "unsure": "too close to tell"}
QUESTION = "Which policy, on how many GPUs, at what cost?"


def plan_page(info: Json) -> Page:
    best = info["recommended"]
    return Page(
        name=f"dsim plan: {info['trace']}",
        question=QUESTION,
        answer=decided(answer(info), uncertain_of(info.get("ensemble"))),
        details=_details(info),
        cautions=cautions(info, best, "policies and fleets"),
        numbers=_numbers(info),
        chart=_costs(info),
        facts=tuple(_facts(info)),
        sections=(
            *(over_time(info) or by_gpu(info)),
            *_clients(info),
            Section("The ranking", (_ranking(info),), spoken=True),
            *_research(info),
            *(Section("The engines' settings", found, spoken=True) for found in [_settings(info)] if found),
            Section("What could change it", (_risks(info), *grown(info)), spoken=True),
            Section("To deploy", tuple(_deploy(info)), spoken=True),
            *of_ensemble(uncertain_of(info.get("ensemble"))),
            *_left_out(info),
        ),
        notes=(*_notes(info), *info["notes"]),
        command=info.get("command", ""),
        version=info.get("dsim", ""),
    )


def words(info: Json) -> Page:
    """For a terminal."""
    page = plan_page({"trace": "", "traffic": "", "profile": "", "estimated": False, "seed": None, **info})
    return replace(page, facts=(), cautions=())


def answer(info: Json) -> str:
    """For the buyer: GPUs, price, attainment, headroom, and what makes them doubtful."""
    best = info["recommended"]
    parts = [_gpus(best)]
    if best["per_hour"] is not None:
        month = money(best["per_hour"] * HOURS / 12, info, 0)
        parts += [f"{money(best['per_hour'], info)} an hour", f"{month} a month"]
    parts += [f"{'meets' if best['gpus'] == 1 else 'meet'} the target {_met(info, best)}", _room_sentence(best)]
    text = ", ".join(parts)
    if not info["deploy"]:
        text += "; no released engine is known to run this policy"
    if best["assumed"] >= 0.01:
        text += f"; {100 * best['assumed']:.0f} % of its time is in large steps, whose cost is assumed, not published"
    text += priced_apart(fleet["implementation"] for fleet in info["ranking"])
    return "; ".join((text, *best["doubted"], *best["untested"])) + "."


def _details(info: Json) -> tuple[str, ...]:
    """The setting, clients' times, the runner-up, laws, growth and router."""
    best, second = info["recommended"], info["runner_up"]
    slos = _and(info.get("slos") or info["criteria"])
    lines = [f"{info['rate']:.4g} req/s within {slos}: {best['policy']} on {gpus_of(best)}."]
    if best["spare"]:
        lines[0] += " The target is met without the spare."
    waits = [
        f"{metric} {number(times['p50'])}, {number(times['p95'])} and {number(times['p99'])} ms"
        for metric in measured.TIMES
        if (times := best["latency_ms"].get(metric))
    ]
    lines += [f"Clients wait for {', '.join(waits)} (p50, p95, p99)."] if waits else []
    lines += measured.of_plan(info.get("measured"))
    lines += [] if second is None else [f"Runner-up: {why(info, best, second)}."]
    lines += [_laws(info), lasting(info), _routed(info)]
    return tuple(filter(None, lines))


def _gpus(fleet: Json) -> str:
    return f"{fleet['gpus']:,} × {fleet['device']}"


def _laws(info: Json) -> str:
    """What the fleet would be under each counted law of canvases; empty if one is given."""
    if not info["laws"]:
        return ""
    needs = "; ".join(
        f"with {law['forwards']:.1f} ('{law['name']}': {law['source'].partition(':')[0]}) it needs "
        + ("more GPUs than were allowed" if law["gpus"] is None else counted(law["gpus"], "GPU"))
        for law in info["laws"]
    )
    return (
        f"The denoising steps of a canvas decide: {needs}. Your server's counters "
        "vllm:diffusion_num_denoising_steps and ..._committed_tokens tell which is yours (--yield METRICS)."
    )


def _routed(info: Json) -> str:
    """What a router that knows the queues would save; empty if one is named."""
    routed = info["routed"]
    if routed is None or routed["replicas"] == info["recommended"]["replicas"]:
        return ""
    price = f", {money(routed['per_hour'], info)} an hour," if info["priced"] else ""
    return (
        f"Requests go to a replica at random, as without a router; behind {routed['name']} "
        f"{counted(routed['gpus'], 'GPU')}{price} would do (--router {routed['name']})."
    )


def why(info: Json, best: Json, second: Json) -> str:
    """The runner-up, and why it lost."""
    name = name_of(second)
    if name in info["tied"]:
        return f"{name}, at the same cost; these replays cannot tell it from the best"
    if math.isclose(cost_of(info, best), cost_of(info, second)):
        if (second["quality"]["relative"] or 1.0) < (best["quality"]["relative"] or 0.0):
            return f"{name}, at the same cost, but with answers of quality {quality(second)} against {quality(best)}"
        gap = f"{met_share(info, second)} against {met_share(info, best)}"
        return f"{name}, at the same cost, but nearer to the SLOs' bounds ({gap})"
    if second["mean_cost"] is not None and info["priced"]:
        paid = [money(cost_of(info, one), info) for one in (second, best)]
        return f"{name} costs {paid[0]} an hour on average over the horizon, against {paid[1]}"
    price = "" if second["per_hour"] is None else f", {money(second['per_hour'], info)} an hour"
    return f"{name} needs {gpus_of(second)}{price}"


def _met(info: Json, fleet: Json) -> str:
    parts = []
    for text, value in fleet["values"].items():
        bound = info["bounds"][text]
        asked = f"{100 * bound:g} % asked"
        if text not in info["share_criteria"]:
            shown = time_of(1e3 * value["value"], bound)
            parts.append(f"with {text.partition('=')[0]} at {shown} ms ({number(1e3 * bound)} ms asked)")
        elif value["value"] == 1 and value["low"] is not None:
            sure = f"surely at least {floor_of(value['low'])} %"
            parts.append(f"for all {fleet['judged']:,} requests judged ({sure}; {asked})")
        else:
            parts.append(f"for {percent(value['value'], bound)} % of requests ({asked})")
    return " and ".join(parts)


def _and(slos: Sequence[str]) -> str:
    plain = [slo.replace("norm_latency=", "") + "/token" if slo.startswith("norm_latency=") else slo for slo in slos]
    return " and ".join(plain)


def _room(fleet: Json) -> str:
    """Rounded outward."""
    if fleet["headroom"] is None:
        return "–"
    low, high = _room_ends(fleet)
    return f"{low} to {high} %"


def _room_ends(fleet: Json) -> tuple[int, int]:
    room = fleet["headroom"]
    return math.floor(100 * room["low"]), math.ceil(100 * room["high"])


def _room_sentence(fleet: Json) -> str:
    low, high = _room_ends(fleet)
    if low > 0:
        return f"with room for {low} to {high} % more traffic"
    return f"with no sure room for more traffic ({low} to {high} %)"


def _numbers(info: Json) -> tuple[Number, ...]:
    best = info["recommended"]
    of_each = f"{counted(bought(best), 'replica')} of {counted(best['gpus_per_replica'], 'GPU')}"
    numbers = [Number("GPUs", ((None, _gpus(best)),), of_each + (f", {best['spare']} spare" if best["spare"] else ""))]
    if best["per_hour"] is not None:
        year = f"{money(cost_of(info, best) * HOURS, info, 0)} a year"
        each = f"{money(best['per_million_tokens'], info)} for a million tokens of answers"
        numbers.append(Number("an hour", ((None, money(best["per_hour"], info)),), f"{year}; {each}"))
    first = next(iter(best["values"]), None)
    if first is not None:
        numbers.append(Number("within the target", ((None, met_share(info, best)),), f"{first}; 95 % sure"))
    numbers.append(Number("room for more traffic", ((None, _room(best)),), "until the target is missed; 95 % sure"))
    return (*numbers, quality_number(best))[:4]


def _facts(info: Json) -> list[tuple[str, str]]:
    price = None if info.get("gpu_hour") is None else f"{info['gpu_hour']} {info.get('currency', '')} for a GPU's hour"
    shown = {
        "Trace": f"{info['traffic']}, at {info['rate']:.4g} req/s",
        "SLOs": ", ".join(info["criteria"]),
        "Price": price,
        **facts(info),
        "Search": f"{info['num_replays']} replays, most of {info['num_requests']:,} requests, resampled "
        f"{info['block']:,} at a time; seed {info['seed']}",
    }
    return [(name, value.strip()) for name, value in shown.items() if value is not None]


def _ranking(info: Json) -> Table:
    several = any(fleet["place"] for fleet in info["ranking"])
    head = ["policy", *(["on"] if several else []), "GPUs", *(["an hour"] if info["priced"] else [])]
    head += ["meet the SLOs", "headroom", "binds first", "limited by", "quality"]
    rows = []
    for fleet in info["ranking"]:
        cells = [fleet["policy"], *([fleet["place"]] if several else []), f"{fleet['gpus']:,}"]
        cells += [money(fleet["per_hour"], info)] if info["priced"] else []
        cells += [met_share(info, fleet), _room(fleet), _binds(info, fleet), _limit(fleet)]
        rows.append([*cells, quality(fleet)])
    caption = (
        "Each policy's smallest fleet that surely meets the SLOs, the cheapest first; at equal cost by quality, then "
        "by distance from the bounds. In brackets: the 95 % interval over replications. Headroom: how much more "
        "traffic the fleet serves before it misses an SLO, as a 95 % interval. Binds first: the SLO that most "
        "requests miss. Quality: of answers, compared with the full cache."
    )
    words = frozenset({0, *(i for i, name in enumerate(head) if name in ("on", "binds first", "limited by"))})
    return table(head, rows, caption=caption, left=words, spare=("quality", "limited by"))


def _binds(info: Json, fleet: Json) -> str:
    """The SLO missed first; of several judged together, by most requests."""
    first = fleet["breaks_first"]
    if first in info["share_criteria"] and len(fleet["attained"]) > 1:
        shares: Mapping[str, float] = fleet["attained"]
        return min(shares, key=lambda slo: shares[slo])
    return "none: the queue grows" if first == "stability" else str(first)


def _limit(fleet: Json) -> str:
    return str(fleet["limited_by"]) + (f", {fleet['limiting_setting']}" if fleet["limiting_setting"] else "")


def _left_out(info: Json) -> tuple[Section, ...]:
    """One row for each reason."""
    names: dict[str, list[str]] = {}
    for fleet in info["left_out"]:
        names.setdefault(fleet["dropped"], []).append(name_of(fleet))
    if not names:
        return ()
    rows = [[", ".join(those), why] for why, those in names.items()]
    return (Section("Left out", (table(["left out", "why"], rows, left=frozenset({0, 1})),), spoken=True),)


def _clients(info: Json) -> tuple[Section, ...]:
    """Percentiles of the recommended fleet, of what runs today, and of the log."""
    best, today, log = info["recommended"], info["today"], info.get("measured")
    columns = {f"{best['policy']} on {gpus_of(best)}": best["latency_ms"]}
    if today is not None:
        columns[f"today, {today['policy']} on {gpus_of(today)}"] = today["latency_ms"]
    if log:
        columns["measured in the log"] = {name: log["summary"][f"{name}_ms"] for name in measured.TIMES}
    rows = []
    for metric in measured.TIMES:
        for stat in ("p50", "p95", "p99"):
            times = [(times.get(metric) or {}).get(stat) for times in columns.values()]
            if times[0] is not None:
                rows.append([f"{metric} {stat}", *("–" if t is None else f"{number(t)} ms" for t in times)])
    if today is not None:
        rows.append(["meet the SLOs", met_share(info, best), met_share(info, today), *(["–"] if log else [])])
    about = "One replay each, at the plan's rate; what runs today is replayed on the recommended GPUs."
    shown = table(["", *columns], rows, caption=about, left=frozenset({0}))
    return (Section("What clients see", (shown,), spoken=True),) if rows else ()


def _research(info: Json) -> tuple[Section, ...]:
    """What schedulers of no engine would save; none without --research."""
    if not info["research"]:
        return ()
    best = cost_of(info, info["recommended"])
    rows = []
    for fleet in info["research"]:
        saves = 1 - cost_of(info, fleet) / best
        cells = [money(fleet["per_hour"], info)] if info["priced"] else []
        rows.append([name_of(fleet), f"{fleet['gpus']:,}", *cells, f"{100 * saves:.0f} %" if saves > 0 else "nothing"])
    caption = "Schedulers that no released engine has, by short replays: what it would be worth to build one."
    head = ["policy", "GPUs", *(["an hour"] if info["priced"] else []), "saves"]
    shown = table(head, rows, caption=caption, left=frozenset({0}))
    return (Section("What a new scheduler would save", (shown,), spoken=True),)


def _risks(info: Json) -> Table:
    best = info["recommended"]
    rows = []
    for risk in info["risks"]:
        met = met_share(info, risk) if risk["values"] else "no replica is left"
        verdict = VERDICTS[risk["verdict"]]
        if risk["values"] and not risk["stable"]:
            verdict += ": the queue grows without end"
        needs = "more than were allowed"
        if risk["needs"] is not None:
            needs = counted((risk["needs"] + best["spare"]) * best["gpus_per_replica"], "GPU")
        if risk["per_hour"] is not None and info["priced"]:
            needs += f", {money(risk['per_hour'], info)} an hour"
        rows.append([risk["change"], f"{met}, {verdict}", needs, risk["best"] or "neither of the best two"])
    without = ", without its spare (except for the lost replica)" if best["spare"] else ""
    caption = f"Of {best['policy']} on {gpus_of(best)}{without}."
    caption += " The last column compares it with the runner-up, by today's cost." if info["runner_up"] else ""
    head = ["with", f"{best['policy']} as planned", "it then needs", "cheapest then"]
    return table(head, rows, caption=caption, left=frozenset({0, 1, 2, 3}))


def _deploy(info: Json) -> list[Block]:
    policy, _, _ = info["plan_toml"].partition("\n[deploy]")
    router = info.get("router", "random")
    intro = _loud(f"plan.toml, for every dsim command that takes a policy (planned with --router {router}):")
    blocks: list[Block] = [intro, Code(tuple(policy.splitlines()))]
    found = info["deploy"]
    if not found:
        return [*blocks, _loud("No released engine is known to run this policy: the file is for dsim's own engine.")]
    many = "once" if found["replicas"] == 1 else f"{found['replicas']} times, one for each replica"
    many += f" ({found['spare']} of them spare)" if found["spare"] else ""
    gpus = "1 GPU" if found["gpus"] == 1 else f"{found['gpus']} GPUs"
    blocks += [
        _loud(f"{found['engine']} ({found['image']}), {found['weights']} weights, {gpus} a replica; {many}:"),
        Code((found["shell"],)),
    ]
    if found["config"]:
        fields = tuple(f"{name}: {value}" for name, value in found["config"].items())
        blocks += [_loud("  with a file dllm.yaml of"), Code(fields, indent="    ")]
    if found["differs"]:
        about = "All else is the release's default."
        blocks.append(
            table(["differs from the default", "why"], found["differs"], caption=about, left=frozenset({0, 1}))
        )
    return [*blocks, _loud(*(f"No flag sets: {text}." for text in found["unsaid"]))]


def _loud(*lines: str) -> Words:
    return Words(lines, loud=True)


def _settings(info: Json) -> tuple[Table, ...]:
    fleets = [fleet for fleet in (*info["ranking"], *info["left_out"]) if fleet["tried"]]
    if not fleets:
        return ()
    several = any(fleet["place"] for fleet in fleets)
    rows = []
    for fleet in fleets:
        found = fleet["tried"]
        gain = "–" if not found["given_rate"] else f"{100 * (found['rate'] / found['given_rate'] - 1):+.0f} %"
        rates = [f"{rate:.3g} req/s" if rate else "at no rate" for rate in (found["given_rate"], found["rate"])]
        best = _changed(found["given"], found["best"])
        where = [fleet["place"]] if several else []
        rows.append([found["given"], *where, str(found["num"]), rates[0], best, rates[1], gain, str(found["equal"])])
    caption = (
        "The rate that one replica serves within the SLOs with the policy's given settings, and with the best settings "
        "of its engine, by replays of 1,600 requests: long enough to choose settings, too short to size a fleet. As "
        "good: other settings within 1 %; the one of fewest changes wins. Beyond what the engine is tested with, a "
        "setting must gain 10 %."
    )
    head = ["policy", *(["on"] if several else []), "settings tried", "as given", "best", "with it", "gain", "as good"]
    words = frozenset(i for i, name in enumerate(head) if name in ("policy", "on", "best"))
    return (table(head, rows, caption=caption, left=words),)


def _changed(given: str, best: str) -> str:
    """Fields that differ from the given policy."""
    before = set(given.split(",")[1:])
    changed = [part for part in best.split(",")[1:] if part not in before]
    return ", ".join(changed) or "as given"


def _costs(info: Json) -> Figure:
    """A bar for each GPU, or for each policy if there is one GPU."""
    each, costs = best_of_each(info), {}
    fleets = [f for f in each if cost(info, f) < math.inf] if len(each) > 1 else list(info["ranking"])
    for fleet in fleets:
        sure, gpus = estimated_gpus(info, fleet)
        label = f"{sure}{gpus:,} × {fleet['device']}" + (" today" if info["growth"] else "")
        if len(each) == 1:
            label = f"{fleet['policy'].replace(',', ',<br>')}<br>{label}"
        costs[f"{label}<br>{fleet['place']}" if label in costs else label] = cost(info, fleet)
    names, paid = list(costs), list(costs.values())
    chart = Chart(height=34 + 20 * sum(2 + name.count("<br>") for name in names))
    chart.layout["margin"] |= {"b": 10}
    chart.add(
        "bar", x=paid, y=names, orientation="h", showlegend=False, cliponaxis=False, hoverinfo="skip",
        text=[f"{one:,.2f}" if info["priced"] else f"{one:,.4g}" for one in paid], textposition="outside",
        marker={"color": [COLOURS[0], *[COLOURS[-1]] * (len(names) - 1)]},
    )  # fmt: skip
    chart.y |= {"autorange": "reversed", "ticks": "", "ticklabelstandoff": 6, "showgrid": False}
    chart.x |= {"visible": False, "range": [0, 1.3 * max(paid)]}
    caption = f"{in_currency(info)}, of the smallest fleet that meets the target at {info['rate']:.4g} req/s"
    title = "What it costs" if info["priced"] else "GPUs"
    return Figure("costs", title, f"{caption}. Blue: the recommendation.", chart)


def _notes(info: Json) -> list[str]:
    notes = []
    best = info["recommended"]
    if best["quality"]["relative"] is None:
        notes.append(f"the quality of the recommended policy is unknown: {' '.join(best['quality']['notes'])}")
    if info["tied"]:
        notes.append(f"as good as the recommendation, within the precision of these replays: {', '.join(info['tied'])}")
    if not info["priced"]:
        notes.append("without --gpu-hour, fleets are ranked by number of GPUs, regardless of their kind")
    return notes
