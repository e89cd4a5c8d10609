"""Ratios on the pages are those of recorded predictions, and at least 30 are of pairs that were not calibrated."""

from dsim.research.reproduce.experiment import CALIBRATED, read
from dsim.research.reproduce.ratios import BEGIN, END, SET_ASIDE, ratios, recorded, tables


def test_pages_have_the_ratios_of_recorded_predictions() -> None:
    for page, text in tables(ratios(recorded())).items():
        assert f"{BEGIN}\n{text}\n{END}" in page.read_text()


def test_recorded_pairs_are_as_published_and_at_least_30_are_not_calibrated() -> None:
    rows, counted = recorded(), 0
    for ratio in ratios(rows):
        counted += not ratio.calibrated and ratio.pair.experiment != SET_ASIDE
        for place in ratio.pair.sides:
            experiment, name, at, measure = place
            series = {s.name: s for s in read(experiment).series}[name]
            found = float(rows[place]["published"]), rows[place]["status"] == CALIBRATED
            assert found == (series.published[measure][at], measure in series.calibrated), place
    assert counted >= 30
