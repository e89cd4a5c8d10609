"""An answer's uncertainty: intervals over drawn profiles, and the causes that move it (a tornado chart)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .chart import Chart, colour
from .digits import outward, places_of
from .page import Block, Figure, Row, Section, Table, Words
from .table import number

Json = Mapping[str, Any]  # Uncertain.to_json()
TITLE = "What the answer depends on"
ASKED_RATE = "the rate asked for"  # of a capacity, in place of a rival
MOST_NAMED = 2  # rivals in the answer


def of_ensemble(found: Mapping[str, Any]) -> tuple[Section, ...]:
    ensemble = found.get("ensemble")
    if ensemble is None:
        return ()
    words = Words(tuple(sentences(ensemble)), loud=True)
    return (Section(TITLE, (words, _intervals(ensemble), *_tornados(ensemble)), spoken=True),)


def decided(answer: str, found: Mapping[str, Any]) -> str:
    """The answer, and how the best compares with its first rivals, if an ensemble has any."""
    ensemble = found.get("ensemble") or {}
    rivals = list(ensemble.get("ratios", {}).items())[:MOST_NAMED]
    if not rivals:
        return answer
    metric = next(iter(rivals[0][1]))
    parts = [f"{times(of[metric])} {name if name == ASKED_RATE else f'that of {name}'}" for name, of in rivals]
    level = f"in {100 * ensemble['level']:.0f} % of {ensemble['num']} drawn profiles"
    said = f"The {metric} of {ensemble['best']} is {' and '.join(parts)}, {level}."
    return ". ".join(filter(None, (answer.removesuffix("."), said)))


def times(ratio: Json) -> str:
    """`1.90 times (1.72 to 2.08)`, to two digits of the half-width."""
    value, low, high = ratio["value"], ratio["low"], ratio["high"]
    if value is None or low is None:
        return f"{number(value)} times"
    half = ((high or low) - low) / 2
    places = places_of(half) if half > 0 else 2
    least = f"{outward(low, places):.{places}f}"
    ends = f"at least {least}" if high is None else f"{least} to {outward(high, places, up=True):.{places}f}"
    return f"{value:.{places}f} times ({ends})"


def sentences(found: Json) -> list[str]:
    """How often the answer holds, and each policy's largest cause."""
    lines = []
    if found["survives"] is not None:
        lines.append(f"{found['answer']} under {100 * found['survives']:.0f} % of {found['num']} drawn profiles.")
    for policy, effects in found["effects"].items():
        moved = [e for e in effects if _known(e)]
        if moved:
            first = moved[0]
            assumed = ", an assumed width" if first["assumed"] else ""
            lines.append(
                f"{policy}: {found['metric']} depends most on {first['cause']} ({number(first['low'])} to "
                f"{number(first['high'])}{assumed})."
            )
            lines.append(measure_next(moved, found["level"]))
        else:
            lines.append(f"{policy}: no uncertainty of the profile moves {found['metric']}.")
    return lines


# How to measure a cause, by prefix; the first match counts.
COMMANDS = {
    "front end": "dsim profile --from-log steps.jsonl --client bench.json",
    "ends at an EOS": "dsim replay --eos, if your answers do",
    "yield": "dsim profile --from-log steps.jsonl, of your traffic",
    "spread between requests": "dsim profile --from-log steps.jsonl, of your traffic",
    "": "dsim profile --from-log steps.jsonl, of your server, or dsim profile --model on this device",
}


def measure_next(moved: Sequence[Json], level: float) -> str:
    """The largest cause, the interval without it, and how to measure it."""
    first = moved[0]
    swings = [abs(e["high"] - e["low"]) for e in moved]
    left = math.sqrt(max(0.0, 1 - swings[0] ** 2 / sum(s**2 for s in swings)))
    command = next(text for name, text in COMMANDS.items() if first["cause"].startswith(name))
    return (
        f"Measure this next: {first['cause']} ({command}). Known, it would leave about {100 * left:.0f} % of the "
        f"{100 * level:.0f} % interval's width."
    )


def _intervals(found: Json) -> Table:
    ratios = found["ratios"]
    head = ["policy", "metric", "predicted", f"{100 * found['level']:.0f} % of profiles"]
    head += [f"{found['best']} has"] if ratios.keys() & found["intervals"].keys() else []
    rows = []
    for policy, metrics in found["intervals"].items():
        for metric, s in metrics.items():
            if s["value"] is None or s["low"] is None:
                continue
            ends = f"{number(s['low'])} to {'more' if s['high'] is None else number(s['high'])}"
            ratio = ratios.get(policy, {}).get(metric)
            cells = (policy, metric, number(s["value"]), ends, "" if ratio is None else times(ratio))
            rows.append(Row(cells[: len(head)], group=policy))
    return Table(tuple(head), tuple(rows), left=frozenset({0, 1}))


def _tornados(found: Json) -> list[Block]:
    blocks: list[Block] = []
    for i, (policy, effects) in enumerate(found["effects"].items()):
        moved = [e for e in effects if _known(e)]
        if not moved:
            continue
        chart = Chart(found["metric"], "", legend=True)
        names = [e["cause"] for e in reversed(moved)]
        for sign, key, shade in (("less", "low", 0.45), ("more", "high", 1.0)):
            at = found["intervals"][policy][found["metric"]]["value"]
            chart.add(
                "bar", orientation="h", y=names, x=[e[key] - at for e in reversed(moved)], base=at, name=sign,
                marker={"color": colour(i), "opacity": shade}, hovertemplate="%{y}: %{x}<extra></extra>",
            )  # fmt: skip
        chart.layout["barmode"] = "overlay"
        caption = "Each cause alone, one standard deviation below and above the profile's value."
        rows = [Row((e["cause"], number(e["low"]), number(e["high"]), e["why"])) for e in moved]
        head = (f"cause, {policy}", f"{found['metric']}, one less", "one more", "its width and source")
        blocks += [
            Figure(f"tornado-{i}", f"What moves {found['metric']} of {policy}", caption, chart),
            Table(head, tuple(rows), left=frozenset({0, 3})),
        ]
    return blocks


def _known(effect: Json) -> bool:
    return effect["low"] is not None and effect["high"] is not None and effect["low"] != effect["high"]
