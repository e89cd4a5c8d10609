"""Importance deltas: what was put in comes out again, and what tells nothing is left out."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from dsim.engine.latency import LatencyModel
from dsim.profiler import measure
from dsim.profiler.fit_commits import split
from dsim.profiler.fit_focus import Deltas, deltas, fit_focus
from dsim.profiler.measure import FEWEST_LOGGED, Loaded, log_commits, measure_eviction, open_any


def test_a_steps_masks_are_standardised_sequence_by_sequence() -> None:
    row = np.array([0, 0, 0, 0, 2, 2, 5, 5, 5])
    column = np.array([3, 4, 8, 9, 0, 7, 1, 2, 3])
    delta = np.array([1, 3, 1, 3, 4, 4, -2, 0, 2], np.float32)
    confidence = np.array([0.2, 0.9, 0.95, 0.1, 1.0, 1.0, 0.3, 0.4, 0.4], np.float32)
    found = deltas(row, column, delta, confidence, 0.9)
    # The sequence of two masks is gone; the last one has none that passes, and two that are best: the left one counts.
    assert found.delta == pytest.approx([-1, 1, -1, 1, -np.sqrt(1.5), 0, np.sqrt(1.5)])
    assert found.distance.tolist() == [0, 1, 5, 6, 0, 1, 2]
    assert found.decodable.tolist() == [False, True, True, False, False, True, False]
    equal = deltas(row, column, np.zeros(9, np.float32), confidence, 0.9)  # they tell nothing
    assert len(equal.delta) == len(equal.distance) == len(equal.decodable) == 0


def drawn(num: int, seed: int = 0) -> Deltas:
    chance = np.random.default_rng(seed)
    decodable, distance = chance.random(num) < 0.2, chance.integers(0, 32, num)
    mean, std = np.where(decodable, 1.7, 0.3), np.where(decodable, 0.9, 0.6)
    return Deltas(mean + std * chance.standard_normal(num) - 0.04 * distance, distance, decodable)


def test_known_means_deviations_and_slope_are_found_again() -> None:
    found = fit_focus([drawn(20_000), drawn(20_000, 1)])
    assert found is not None
    assert found.decodable_mean == pytest.approx(1.7, abs=0.03)
    assert found.decodable_std == pytest.approx(0.9, rel=0.03)
    assert found.undecodable_mean == pytest.approx(0.3, abs=0.02)
    assert found.undecodable_std == pytest.approx(0.6, rel=0.03)
    assert found.distance_slope == pytest.approx(0.04, abs=0.001)


def test_too_few_masks_and_masks_of_one_class_give_no_fit() -> None:
    assert fit_focus([]) is None
    assert fit_focus([drawn(199)]) is None
    assert fit_focus([drawn(200)]) is not None
    some = drawn(300)
    assert fit_focus([Deltas(some.delta, some.distance, np.ones(300, np.bool_))]) is None


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return open_any("tiny", "cpu")


@pytest.mark.slow
def test_the_tiny_models_importance_tells_what_it_can_decode(tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=itertools.count().__next__)  # a second a step, however slow the machine
    monkeypatch.setattr(measure, "time", clock)
    told: list[Deltas] = []
    log = log_commits(tiny, "source", 0.9, 1.0, 15.0, collected=told)
    found = fit_focus(told)
    assert found is not None
    assert found.decodable_mean > found.undecodable_mean + 0.3
    assert 0.0 < found.distance_slope < 0.2
    # What is decodable commits, and nothing else does; the log counts blocks of fewer than three masks too.
    decodable = sum(int(d.decodable.sum()) for d in told)
    assert 0.8 * log.committed.sum() < decodable <= log.committed.sum()


@pytest.mark.slow
def test_a_commit_log_goes_on_over_its_budget_until_requests_have_completed(tiny: Loaded) -> None:
    log = log_commits(tiny, "records", 0.9, 1.0, 0.0)
    fitted, held_out = split(log)
    assert len(held_out)
    assert len(np.unique(np.concatenate([fitted.request, held_out.request]))) >= FEWEST_LOGGED


def test_an_eviction_costs_what_the_steps_took_beyond_the_model(tiny: Loaded) -> None:
    free, dear = (LatencyModel(((0.0, seconds),), 0.0) for seconds in (0.0, 1000.0))
    assert 0.0 < measure_eviction(tiny, free, most_batch=8) < 60.0
    assert measure_eviction(tiny, dear, most_batch=1) == 0.0
