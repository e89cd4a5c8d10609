"""The page of `dsim tune`: best settings, their certainty, trials."""

import math
from collections.abc import Sequence

import pandas as pd

from ..results.spread import uncertain_of
from .chart import COLOURS, INK, Chart
from .digits import counted, percent, plus_minus
from .ensemble import decided, of_ensemble
from .page import Figure, Number, Page, Section, Table, Words, priced_apart, table
from .search import Json, cautions, quality, quality_number
from .search import facts as search_facts

HIGHER = ("goodput", "throughput")
GAIN = "A gain above zero is better: more goodput or throughput, less cost or latency."


def tune_page(info: Json, trials: pd.DataFrame) -> Page:
    first = next(iter(info["objectives"]))
    chart, *rest = figures(info, trials)
    return Page(
        name=f"dsim tune: {info.get('trace', 'a search')}",
        question="Which settings serve this traffic best?",
        answer=decided(answer(info), uncertain_of(info.get("ensemble"))),
        cautions=cautions(info, info["winner"], "policies"),
        numbers=_numbers(info, first),
        chart=chart,
        facts=tuple(_facts(info)),
        sections=(
            _confirmed(info),
            *of_ensemble(uncertain_of(info.get("ensemble"))),
            Section("The search", tuple(rest)),
        ),
        notes=tuple(info["notes"]),
        command=info.get("command", ""),
        version=info.get("dsim", ""),
    )


def words(info: Json) -> Page:
    """For a terminal."""
    return Page(
        name="dsim tune",
        question="Which settings serve this traffic best?",
        answer=decided(answer(info), uncertain_of(info.get("ensemble"))),
        sections=(_confirmed(info), *of_ensemble(uncertain_of(info.get("ensemble")))),
        notes=tuple(info["notes"]),
    )


def _confirmed(info: Json) -> Section:
    roles = Words(tuple(f"  {role}: {spelt(f)}" for role, f in finalists(info)), loud=True)
    run = [Words((f"Run it: {info['run']}",))] if "run" in info else []
    return Section("Confirmed", (roles, _table(info), *run))


def answer(info: Json) -> str:
    name = next(iter(info["objectives"]))
    winner, default = info["winner"], info["default"]
    is_fleet = "pools" in default  # its name takes lines
    kept = "the fleet as given" if is_fleet else spelt(default)
    if was_default(info, winner):
        text = f"{'The fleet as given' if is_fleet else kept}, the default, is the best of the "
        return text + f"{info['num_trials']} settings tried." + _equals(info) + _attained(info, default, None)
    gain = f"a gain in {name} of {gain_text(winner['gains'][name])} over {kept}"
    if winner["gains"][name]["value"] is None:  # the default's value is zero
        had, has = (f"{f['values'][name]['value']:.4g}" for f in (default, winner))
        gain = f"{name} {has} {_unit(info, info['objectives'][name])} against {had} of {kept}"
    gain += ", on traffic that the search never saw" + priced_apart(info.get("implementations", ()))
    text = f"{spelt(winner)}: {gain}."
    if not info["confirmed"]:
        found = "the best found" if is_fleet else f"the best found, {spelt(winner)},"
        text = f"Keep {kept}: {found} has {gain}."
    return text + _equals(info) + _attained(info, default, winner)


def _equals(info: Json) -> str:
    """How many settings are as good as the one named, and whether it leaves what was tested."""
    recommended = info["winner" if info["confirmed"] else "default"]
    text = "".join(f" {said}." for said in recommended["untested"])
    if info["equal"]:
        does = "does" if info["equal"] == 1 else "do"
        text += (
            f" {counted(info['equal'], 'other setting')} {does} as well within 1 %; this one changes the fewest of the "
            "engine's own settings."
        )
    return text


def _attained(info: Json, default: Json, winner: Json | None) -> str:
    """SLOs that the default misses and the best setting meets."""
    text = ""
    if default["meets_run_slos"] < 0.5:
        text = f" The policy to beat misses an SLO on the run in {1 - default['meets_run_slos']:.0%} of replays"
        if winner is not None and winner["meets_run_slos"] >= 0.5:
            text += f"; the best that meets them {_worth(info, winner)}"
        text += "."
    if default["attainment"] is not None:
        text += f" The policy to beat meets the SLOs for {_share(default['attainment'])} of requests"
        if winner is not None:
            text += f", the best for {_share(winner['attainment'])}"
        text += "."
    return text


def _worth(info: Json, finalist: Json) -> str:
    name, unit = next(iter(info["objectives"].items()))
    return f"{'costs' if name == 'cost' else 'has'} {finalist['values'][name]['value']:.4g} {_unit(info, unit)}"


def _unit(info: Json, unit: str) -> str:
    return unit.replace("$", info.get("currency") or "$")


def _share(value: float | None) -> str:
    return "an unknown share" if value is None else f"{percent(value)} %"


def gain_text(gain: Json) -> str:
    """Positive is better."""
    if gain["value"] is None:
        return "unknown"
    value, low, high = (100 * gain[key] for key in ("value", "low", "high"))
    return f"{value:+.1f} % (95 %: {low:+.1f} to {high:+.1f})"


def spelt(finalist: Json) -> str:
    alone = "pools" in finalist or finalist["replicas"] == 1
    fleet = "" if alone else f" on {finalist['replicas']} replicas"
    return f"{finalist['policy']}{fleet}"


def finalists(info: Json) -> list[tuple[str, Json]]:
    """With their roles."""
    front = [(f"front {i}", f) for i, f in enumerate(info["front"], 1)]
    if not front:
        front = [("winner", info["winner"])]
        if info["runner_up"] is not None:
            front.append(("runner-up", info["runner_up"]))
    is_default = [was_default(info, f) for _, f in front]
    rows = [(f"{role}, default" if same else role, f) for (role, f), same in zip(front, is_default, strict=True)]
    return rows if any(is_default) else [*rows, ("default", info["default"])]


def was_default(info: Json, finalist: Json) -> bool:
    return all(finalist[key] == info["default"][key] for key in ("policy", "replicas"))


def _table(info: Json) -> Table:
    heads = ["", "quality"]
    for name, unit in info["objectives"].items():
        heads += [f"{name} ({_unit(info, unit)})", "gain over the default"]
    heads += ["requests that meet the SLOs"]
    rows = [[role, *_cells(info, finalist)] for role, finalist in finalists(info)]
    keep = [i for i in range(len(heads)) if i == 0 or any(row[i] for row in rows)]
    caption = (
        "Means over new random draws on the part of the trace that the search did not use, with 95 % intervals. Gains "
        f"compare with the default on the same requests. {GAIN}"
    )
    return table([heads[i] for i in keep], [[row[i] for i in keep] for row in rows], caption=caption)


def _cells(info: Json, finalist: Json) -> list[str]:
    """Quality, value and gain by objective, attainment."""
    cells = [quality(finalist)]
    for name in info["objectives"]:
        value = finalist["values"][name]
        cells.append(plus_minus(value["value"], (value["high"] - value["low"]) / 2))
        cells.append("" if was_default(info, finalist) else gain_text(finalist["gains"][name]))
    share = finalist["attainment"]
    return [*cells, "" if share is None else f"{percent(share)} %"]


def _numbers(info: Json, name: str) -> tuple[Number, ...]:
    best = info["winner"] if info["confirmed"] else info["default"]
    gain, value = info["winner"]["gains"][name], best["values"][name]
    shown = "none" if gain["value"] is None or was_default(info, info["winner"]) else f"{100 * gain['value']:+.1f} %"
    numbers = [Number(f"gain in {name}", ((None, shown),), "over the default, on traffic that the search never saw")]
    unit = _unit(info, info["objectives"][name])
    numbers.append(Number(name, ((None, f"{value['value']:.4g}"),), f"{unit}, of the recommended setting"))
    if best["attainment"] is not None:
        about = f"the default: {_share(info['default']['attainment'])}"
        numbers.append(Number("requests that meet the SLOs", ((None, _share(best["attainment"])),), about))
    which = "of each pool" if "pools" in best else "of the recommended setting"
    numbers.append(Number("replicas", ((None, f"{best['replicas']}"),), which))
    return (*numbers, quality_number(best))[:4]


def _facts(info: Json) -> list[tuple[str, str]]:
    price = info.get("gpu_hour")
    known = {
        "Trace": info.get("traffic", info.get("trace")),
        **search_facts(info),
        "SLOs": ", ".join(info.get("slos", [])) or "none",
        "Price": None if price is None else f"{price:g} {info.get('currency', '')} for a GPU's hour",
        "Search": f"{info['num_trials']} settings tried, {info['num_replays']} replays, seed {info.get('seed')}",
        "Confirmed on": f"{info['replications']} replications of the held-out part, paired",
    }
    return [(name, value) for name, value in known.items() if value is not None]


def figures(info: Json, trials: pd.DataFrame) -> list[Figure]:
    """The answer's first."""
    names = list(info["objectives"])
    whole = trials[trials["state"] == "complete"]
    first = names[0]
    found = [
        Figure("gains", "Confirmed gain", f"In {first}, on held-out traffic, with 95 % intervals. {GAIN}",
               _gains(info, first))
    ]  # fmt: skip
    if len(names) > 1:
        about = "Each point is a setting; those on the line are not beaten in both objectives by any other."
        found.insert(0, Figure("front", "The front", about, _front(info, whole, names[0], names[1])))
    grouped = "replicas of each pool" if "pools" in info["default"] else "policy"
    about = (
        f"{first} of each setting, in the colour of its {grouped}: ● meets every SLO with a statistic, ✕ misses one. "
        "The line shows the best so far that meets them."
    )
    found.append(Figure("history", "Trials", about, _history(info, whole, first)))
    return found


def _history(info: Json, whole: pd.DataFrame, name: str) -> Chart:
    chart = Chart("trial", f"{name} ({_unit(info, info['objectives'][name])})", legend=True, from_zero=False)
    feasible = whole["violation"].fillna(0) <= 0
    for group_name, group, colour in _groups(info, whole):
        ok = feasible[group.index]
        marker = {"color": colour, "symbol": ["circle" if v else "x-thin-open" for v in ok], "size": 7}
        chart.add(
            "scatter", x=group["trial"].tolist(), y=group[name].tolist(), mode="markers",
            name=group_name, text=group["policy"].tolist(), marker=marker,
        )  # fmt: skip
    values = whole[name].where(feasible)
    best = (values.cummax() if name in HIGHER else values.cummin()).ffill()
    chart.add(
        "scatter", x=whole["trial"].tolist(), y=[None if math.isnan(v) else float(v) for v in best], mode="lines",
        name="best so far", line={"color": INK, "width": 1.5, "shape": "hv"},
    )  # fmt: skip
    return chart


def _front(info: Json, whole: pd.DataFrame, x: str, y: str) -> Chart:
    units = info["objectives"]
    chart = Chart(f"{x} ({_unit(info, units[x])})", f"{y} ({_unit(info, units[y])})", legend=True, from_zero=False)
    for group_name, group, colour in _groups(info, whole):
        chart.add(
            "scatter", x=group[x].tolist(), y=group[y].tolist(), mode="markers", name=group_name,
            text=group["policy"].tolist(), marker={"color": colour, "size": 7},
        )  # fmt: skip
    points = sorted((f["searched"][x], f["searched"][y], spelt(f)) for f in info["front"])
    chart.add(
        "scatter", x=[p[0] for p in points], y=[p[1] for p in points], text=[p[2] for p in points],
        mode="lines+markers", name="front", line={"color": INK, "width": 1.5, "shape": "hv"},
        marker={"size": 10, "symbol": "circle-open", "color": INK},
    )  # fmt: skip
    return chart


def _gains(info: Json, name: str) -> Chart:
    chart = Chart("gain over the default", "", legend=True, from_zero=False)
    shown = [
        (role, f) for role, f in finalists(info) if "default" not in role and f["gains"][name]["value"] is not None
    ]
    gains = [f["gains"][name] for _, f in shown]
    chart.add(
        "scatter", x=[g["value"] for g in gains], y=[role for role, _ in shown], mode="markers", showlegend=False,
        text=[spelt(f) for _, f in shown], marker={"color": COLOURS[0], "size": 9},
        error_x={"type": "data", "array": [g["high"] - g["value"] for g in gains]},
    )  # fmt: skip
    chart.vline(0.0, dash="solid")
    chart.x["tickformat"] = "+.1~%"
    chart.y["autorange"] = "reversed"
    return chart


def _groups(info: Json, trials: pd.DataFrame) -> Sequence[tuple[str, pd.DataFrame, str]]:
    """By preset, or by a fleet's replicas: name, trials, colour."""
    is_fleet = "pools" in info["default"]
    of = trials["replicas"] if is_fleet else trials["policy"].str.split(",").str[0]
    coloured = sorted(dict.fromkeys(of)) if is_fleet else list(info["space"])
    found = []
    for name in dict.fromkeys(of):
        colour = COLOURS[coloured.index(name) % len(COLOURS)] if name in coloured else INK
        found.append((str(name), trials[of == name], colour))
    return found
