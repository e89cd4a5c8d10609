"""An answer's uncertainty: intervals over drawn profiles, and the causes that move it (a tornado chart)."""

import math
from collections.abc import Sequence

from ..results.spread import Effect, Spread, Uncertain
from .page import Block, Section, Table, Words, table
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
    for policy, effects in ensemble.effects.items():
        rows = [(effect.cause, number(effect.low), number(effect.high), effect.why) for effect in _moving(effects)]
        if rows:
            metric = ensemble.metric
            head = (f"cause, {policy}", f"{metric}, one less", "one more", "its width and source")
            caption = "Each cause alone, one standard deviation below and above the profile's value."
            blocks.append(table(head, rows, caption=caption, left=frozenset({0, 3})))
    return (Section(TITLE, tuple(blocks), spoken=True),)


def decided(answer: str, ensemble: Uncertain | None) -> str:
    """The answer, and how the best compares with its first rivals, if an ensemble has any."""
    if ensemble is None or not ensemble.ratios:
        return answer
    rivals = []
    for name, ratio in list(ensemble.ratios.items())[:MOST_NAMED]:
        [metric, spread], *_ = ratio.items()
        rivals.append(f"{times(spread)} that of {name}")
    level = f"in {100 * ensemble.level:.0f} % of {ensemble.num} drawn profiles"
    comparison = f"The {metric} of {ensemble.best} is {' and '.join(rivals)}, {level}."
    return f"{answer.removesuffix('.')}. {comparison}".removeprefix(". ")


def times(ratio: Spread) -> str:
    """`1.90 times (1.72 to 2.08)`, to two digits of the half-width."""
    value, low, high = ratio.value, ratio.low, ratio.high
    if value is None or low is None:
        return f"{number(value)} times"
    half, places = ((high or low) - low) / 2, 2
    if half > 0:
        places = places_of(half)
    least = f"{outward(low, places):.{places}f}"
    if high is None:
        return f"{value:.{places}f} times (at least {least})"
    return f"{value:.{places}f} times ({least} to {outward(high, places, up=True):.{places}f})"


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
        ends = f"{number(first.low)} to {number(first.high)}" + ", an assumed width" * first.assumed
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
    rows = []
    for policy, metrics in ensemble.intervals.items():
        for metric, spread in metrics.items():
            if spread.value is None or spread.low is None:
                continue
            high = number(spread.high) if spread.high is not None else "more"
            rows.append((policy, metric, number(spread.value), f"{number(spread.low)} to {high}"))
    head = ("policy", "metric", "predicted", f"{100 * ensemble.level:.0f} % of profiles")
    return table(head, rows, left=frozenset({0, 1}))
