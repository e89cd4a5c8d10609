"""A part of an experiment, for a test that needs no more."""

from collections.abc import Collection
from dataclasses import replace

from dsim.research.reproduce.experiment import Experiment, read
from dsim.research.reproduce.points import ResultRow, reproduce


def part(name: str, series: Collection[str], at: Collection[str]) -> Experiment:
    """These series of a shipped experiment, at these places."""
    whole = read(name)
    kept = [replace(s, runs=tuple(run for run in s.runs if run.at in at)) for s in whole.series if s.name in series]
    assert {s.name for s in kept} == set(series)
    assert all(len(s.runs) == len(at) for s in kept)
    return replace(whole, series=tuple(kept))


def rows(experiment: Experiment) -> dict[tuple[str, str, str], ResultRow]:
    """Its rows by series, place and measure."""
    return {(r.series, r.at, r.measure): r for r in reproduce([experiment], jobs=1).rows}
