"""An answer's uncertainty: intervals over drawn profiles, and the causes that move it (a tornado chart)."""

import math
from collections.abc import Sequence

from ..results.spread import Effect, Spread, Uncertain
from .chart import Chart, colour
from .page import Block, Figure, Row, Section, Table, Words
from .table import number, outward, places_of

TITLE = "What the answer depends on"
MOST_NAMED = 2  # rivals in the answer
# How to measure a cause, by prefix; the first match counts.
COMMANDS = {
    "front end": "dsim profile --from-log steps.jsonl --client bench.json",
    "ends at an EOS": "dsim replay --eos, if your answers do",
    "yield": "dsim profile --from-log steps.jsonl, of your traffic",
    "spread between requests": "dsim profile --from-log steps.jsonl, of your traffic",
    "": "dsim profile --from-log steps.jsonl, of your server, or dsim profile --model on this device",
}


def of_ensemble(ensemble: Uncertain | None) -> tuple[Section, ...]:
    if ensemble is None:
        return ()
    blocks: list[Block] = [Words(tuple(sentences(ensemble)), loud=True), _intervals(ensemble)]
    for i, policy in enumerate(ensemble.effects):
        blocks += _tornado(ensemble, policy, i)
    return (Section(TITLE, tuple(blocks), spoken=True),)


def decided(answer: str, ensemble: Uncertain | None) -> str:
    """The answer, and how the best compares with its first rivals, if an ensemble has any."""
    if ensemble is None or not ensemble.ratios:
        return answer
    rivals = list(ensemble.ratios.items())[:MOST_NAMED]
    metric = next(iter(rivals[0][1]))
    parts = [f"{times(ratio[metric])} that of {name}" for name, ratio in rivals]
    level = f"in {100 * ensemble.level:.0f} % of {ensemble.num} drawn profiles"
    comparison = f"The {metric} of {ensemble.best} is {' and '.join(parts)}, {level}."
    return f"{answer.removesuffix('.')}. {comparison}" if answer else comparison


def times(ratio: Spread) -> str:
    """`1.90 times (1.72 to 2.08)`, to two digits of the half-width."""
    value, low, high = ratio.value, ratio.low, ratio.high
    if value is None or low is None:
        return f"{number(value)} times"
    half = ((high or low) - low) / 2
    places = places_of(half) if half > 0 else 2
    least = f"{outward(low, places):.{places}f}"
    ends = f"at least {least}" if high is None else f"{least} to {outward(high, places, up=True):.{places}f}"
    return f"{value:.{places}f} times ({ends})"


def sentences(ensemble: Uncertain) -> list[str]:
    """How often the answer holds, and each policy's largest cause."""
    lines = []
    if ensemble.survives is not None:
        share = f"{100 * ensemble.survives:.0f} % of {ensemble.num} drawn profiles"
        lines.append(f"{ensemble.answer} under {share}.")
    for policy, effects in ensemble.effects.items():
        if not _moving(effects):
            lines.append(f"{policy}: no uncertainty of the profile moves {ensemble.metric}.")
            continue
        first = effects[0]
        ends = f"{number(first.low)} to {number(first.high)}{', an assumed width' if first.assumed else ''}"
        lines.append(f"{policy}: {ensemble.metric} depends most on {first.cause} ({ends}).")
        lines.append(_measure_next(effects, ensemble.level))
    return lines


def _moving(effects: Sequence[Effect]) -> list[Effect]:
    return [effect for effect in effects if effect.swing > 0]


def _measure_next(effects: Sequence[Effect], level: float) -> str:
    """The largest cause, how to measure it, and the interval without it."""
    first = effects[0]
    remaining = math.sqrt(1 - first.swing**2 / sum(effect.swing**2 for effect in effects))
    command = next(text for name, text in COMMANDS.items() if first.cause.startswith(name))
    return (
        f"Measure this next: {first.cause} ({command}). Known, it would leave about {100 * remaining:.0f} % of the "
        f"{100 * level:.0f} % interval's width."
    )


def _intervals(ensemble: Uncertain) -> Table:
    head = ["policy", "metric", "predicted", f"{100 * ensemble.level:.0f} % of profiles"]
    if ensemble.ratios.keys() & ensemble.intervals.keys():
        head.append(f"{ensemble.best} has")
    rows = []
    for policy, metrics in ensemble.intervals.items():
        for metric, spread in metrics.items():
            if spread.value is None or spread.low is None:
                continue
            ends = f"{number(spread.low)} to {'more' if spread.high is None else number(spread.high)}"
            ratio = ensemble.ratios.get(policy, {}).get(metric)
            cells = (policy, metric, number(spread.value), ends, "" if ratio is None else times(ratio))
            rows.append(Row(cells[: len(head)], group=policy))
    return Table(tuple(head), tuple(rows), left=frozenset({0, 1}))


def _tornado(ensemble: Uncertain, policy: str, index: int) -> list[Block]:
    """The causes that move a policy's metric."""
    effects, metric = _moving(ensemble.effects[policy]), ensemble.metric
    if not effects:
        return []
    chart = Chart(metric, "", legend=True)
    predicted = ensemble.intervals[policy][metric].value or 0.0
    lows, highs = [effect.low for effect in effects], [effect.high for effect in effects]
    for sign, ends, shade in (("less", lows, 0.45), ("more", highs, 1.0)):
        chart.add(
            "bar", orientation="h", y=[effect.cause for effect in reversed(effects)],
            x=[end - predicted for end in reversed(ends)], base=predicted, name=sign,
            marker={"color": colour(index), "opacity": shade}, hovertemplate="%{y}: %{x}<extra></extra>",
        )  # fmt: skip
    chart.layout["barmode"] = "overlay"
    caption = "Each cause alone, one standard deviation below and above the profile's value."
    rows = [Row((effect.cause, number(effect.low), number(effect.high), effect.why)) for effect in effects]
    head = (f"cause, {policy}", f"{metric}, one less", "one more", "its width and source")
    return [
        Figure(f"tornado-{index}", f"What moves {metric} of {policy}", caption, chart),
        Table(head, tuple(rows), left=frozenset({0, 3})),
    ]
