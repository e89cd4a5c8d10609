"""Predicted and published ratios of engines, GPUs and policies: docs/validation.md has a summary, and
research/evidence/ratios.md and benchmarks/published.md the tables.

    python -m dsim.research.reproduce.ratios [--draws N]

It reads recorded.csv and the pairs of ratios.csv. --draws: draw the pairs' intervals again, by the experiments as they
are now.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from ...files.read import read_csv
from ...files.write import csv_of, write_whole
from ...planner.ensemble import drawn, interval, known_causes, moved
from ...results.world import World
from .experiment import CALIBRATED, read
from .measures import OVER, of_run, unit_of
from .points import PLACE, RECORDED

PAIRS = Path(__file__).parent / "ratios.csv"
ROOT = Path(__file__).parents[2]
VALIDATION, PUBLISHED = ROOT / "docs/validation.md", ROOT / "benchmarks/published.md"
EVIDENCE = ROOT / "research/evidence/ratios.md"
BEGIN, END = "<!-- ratios: research/reproduce/ratios.py writes this -->", "<!-- /ratios -->"
SET_ASIDE, MEMORY = "set-aside", "memory"
Rows = Mapping[tuple[str, ...], Mapping[str, str]]


@dataclass(frozen=True)
class Pair:
    """A series at a place over another; without `over` the measure is a published ratio."""

    kind: str  # of decision
    experiment: str
    measure: str
    series: str
    at: str
    over: str
    over_at: str
    given: str  # what was taken from the runs or their publication, other than constants
    low: str = ""  # of the interval of the predicted ratio; empty: not drawn
    high: str = ""

    @property
    def sides(self) -> tuple[tuple[str, ...], ...]:
        """Places in recorded.csv."""
        first = (self.experiment, self.series, self.at, self.measure)
        return (first, (self.experiment, self.over, self.over_at, self.measure)) if self.over else (first,)

    @property
    def series_pair(self) -> tuple[str, ...]:
        return self.kind, self.experiment, self.measure, self.series, self.over, str(self.at == self.over_at)


@dataclass(frozen=True)
class Ratio:
    pair: Pair
    predicted: float
    published: float
    calibrated: str  # the side that was, above or below the line, or both; empty: neither

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def is_held(self) -> bool | None:
        """Whether the interval holds the published ratio; None without an interval."""
        return float(self.pair.low) <= self.published <= float(self.pair.high) if self.pair.low else None


def pairs() -> list[Pair]:
    return [Pair(**row) for _, row in read_csv(PAIRS, [f.name for f in fields(Pair)])]


def recorded() -> Rows:
    return {tuple(row[name] for name in PLACE): row for _, row in read_csv(RECORDED, (*PLACE, "published", "status"))}


def ratios(rows: Rows) -> list[Ratio]:
    return [_ratio(pair, rows) for pair in pairs()]


def _ratio(pair: Pair, rows: Rows) -> Ratio:
    sides = [rows[place] for place in pair.sides]
    predicted, published = (
        float(sides[0][name]) / (float(sides[1][name]) if pair.over else 1.0) for name in ("predicted", "published")
    )
    return Ratio(pair, predicted, published, _calibrated([side["status"] for side in sides]))


def _calibrated(statuses: Sequence[str]) -> str:
    names = [name for name, status in zip(("above", "below"), statuses, strict=False) if status == CALIBRATED]
    return "both" if len(names) == 2 else "".join(names)


# The tables


def tables(found: Sequence[Ratio]) -> dict[Path, str]:
    """Markdown by page: a summary, the pairs that count and those set aside, and calibrated pairs."""
    whole = ("experiment", "ratio", "predicted", "published", "error, %", "90 %", "given")
    aside = [r for r in found if r.pair.experiment == SET_ASIDE]
    counted = [r for r in found if not r.calibrated and r not in aside]
    speed = [r for r in counted if r.pair.kind != MEMORY]
    by_kind = "; ".join(
        f"{kind} {_summary(list(own))}" for kind, own in groupby(counted, key=lambda ratio: ratio.pair.kind)
    )
    decides = [*_lines(counted, *whole), "", "Set aside, used for nothing:", "", *_lines(aside, *whole)]
    summary = f"{_summary(counted)}. Without memory: {_summary(speed)}. By kind: {by_kind}."
    calibrated = _lines([r for r in found if r.calibrated], "experiment", "ratio", "error, %", "calibrated")
    return {VALIDATION: summary, EVIDENCE: "\n".join(decides), PUBLISHED: "\n".join(calibrated)}


def _summary(found: Sequence[Ratio]) -> str:
    median = 100 * float(np.median([abs(r.error) for r in found]))
    held = [r.is_held for r in found if r.is_held is not None]
    coverage = f", {sum(held)} of {len(held)} intervals hold" if held else ""
    return f"{len(found)} pairs, median error {median:.1f} %{coverage}"


def _lines(found: Sequence[Ratio], *columns: str) -> Iterator[str]:
    """A row for each pair of series."""
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for _, group in groupby(found, key=lambda ratio: ratio.pair.series_pair):
        own = list(group)
        cells = {
            "experiment": own[0].pair.experiment,
            "ratio": _label([ratio.pair for ratio in own]),
            "predicted": ", ".join(f"{r.predicted:.3g}" for r in own),
            "published": ", ".join(f"{r.published:.3g}" for r in own),
            "error, %": ", ".join(f"{100 * r.error:+.1f}" for r in own),
            "90 %": ", ".join(_interval(r) for r in own if r.pair.low),
            "given": own[0].pair.given,
            "calibrated": own[0].calibrated,
        }
        yield f"| {' | '.join(cells[name] for name in columns)} |"


def _interval(ratio: Ratio) -> str:
    return f"{float(ratio.pair.low):.3g}..{float(ratio.pair.high):.3g}"


def _label(own: Sequence[Pair]) -> str:
    first, places = own[0], ", ".join(pair.at for pair in own)
    name, of, other = first.measure.partition(OVER)
    what = unit_of(name)
    if not first.over:
        return f"{first.series}{of}{other}, {what}: {places}"
    if first.at != first.over_at:
        return f"{first.series}, {what}: {', '.join(f'{pair.at} / {pair.over_at}' for pair in own)}"
    return f"{first.series} / {first.over}, {what}: {places}"


# Intervals


def with_intervals(draws: int) -> Iterator[Pair]:
    """The pairs, with intervals of predicted ratios of runs; both sides have each draw's profile and luck."""
    rows = recorded()
    for pair in pairs():
        pair = replace(pair, low="", high="")
        measure = pair.measure.partition(OVER)[0]
        if pair.kind != MEMORY and not _ratio(pair, rows).calibrated:
            over = pair.over or pair.measure.partition(OVER)[2]
            sides = [_values(pair.experiment, pair.series, pair.at, measure, draws)]
            sides.append(_values(pair.experiment, over, pair.over_at or pair.at, measure, draws))
            spread = interval([a / b for a, b in zip(*sides, strict=True)])
            pair = replace(pair, low=f"{spread.low:.4g}", high=f"{spread.high:.4g}")
        yield pair


def _values(experiment: str, series: str, at: str, measure: str, draws: int) -> list[float]:
    """Predicted, then drawn."""
    (world,) = (run.world for s in read(experiment).series if s.name == series for run in s.runs if run.at == at)
    causes = known_causes(world)
    return [_value(moved(world, drawn(causes, i, world.seed)) if i else world, measure) for i in range(draws + 1)]


def _value(world: World, measure: str) -> float:
    result = world.simulate_whole(world.requests())
    return of_run(measure, world.summarize(result), result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, metavar="N")
    draws = parser.parse_args().draws
    if draws is not None:
        names = [f.name for f in fields(Pair)]
        rows = [[getattr(pair, name) for name in names] for pair in with_intervals(draws)]
        write_whole(PAIRS, csv_of([names, *rows]))
    for page, text in tables(ratios(recorded())).items():
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        write_whole(page, f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
        print(text)


if __name__ == "__main__":
    main()
