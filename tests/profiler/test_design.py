"""Shapes chosen where the fit is least sure teach it more than shapes chosen by chance."""

from dataclasses import replace

import numpy as np
import pytest

from dsim.engine.latency import Features, LatencyModel, bucket
from dsim.profiler.design import next_shapes
from dsim.profiler.fit import fit_latency, predict
from dsim.profiler.samples import samples

from .machines import THREE, run, shapes


def error(machine: LatencyModel, chosen: list[Features], seed: int) -> float:
    """The 95th percentile of the error on other shapes, of a fit to the chosen ones alone."""
    taken = run(machine, chosen, seed, timed=False)
    model, _ = fit_latency(taken, journal=taken)  # of which none is held out
    others = np.array(shapes(400, 1000), np.float64)
    return float(np.quantile(np.abs(predict(model, others) / predict(machine, others) - 1.0), 0.95))


@pytest.mark.slow
def test_chosen_shapes_reach_an_error_with_fewer_points_than_chance() -> None:
    chosen_errors, random_errors = [], []
    for seed in range(4):
        offered = shapes(300, seed)
        order = np.random.default_rng(seed).permutation(300)
        chosen = [offered[i] for i in order[:12]]
        while len(chosen) < 30:
            taken = run(THREE, chosen, seed, timed=False)
            chosen += [offered[i] for i in next_shapes(offered, taken, 6)]
        chosen_errors.append(error(THREE, chosen, seed))
        random_errors.append(error(THREE, [offered[i] for i in order[:45]], seed))
    # 30 chosen points beat 45 of chance, in the mean over four runs' noise.
    assert np.mean(chosen_errors) < np.mean(random_errors)
    assert np.mean(chosen_errors) < 0.03


def test_a_feature_that_no_step_has_told_is_asked_for_first() -> None:
    same = [Features(32 * b, 32 * b * 500, 500 * b, 32 * b, 32 * b, b, 0) for b in range(1, 31)]
    long = Features(320, 320 * 4000, 40_000, 320, 320, 10, 0)
    offered = [*same, Features(330, 330 * 500, 5000, 330, 330, 10, 0), long]
    assert next_shapes(offered, run(THREE, same, 1), 2)[0] == offered.index(long)


def test_captured_shapes_of_one_bucket_tell_the_same() -> None:
    # One row after 500 keys computes what differs by its bucket alone: many shapes of some buckets, few of others.
    offered = [Features(t, 500, 500, t, t, 1, 0) for t in (1, 3, 4, 9, *range(65, 129), *range(1025, 1281, 4))]
    seen = [Features(t, 500, 500, t, t, 1, 0) for t in (2, 6, 16, 200, 2000)]
    taken = run(replace(THREE, graph_tokens=8192), seen, 1, timed=False)
    # Every bucket that nothing was measured of comes before one of them comes twice.
    chosen, eager = (next_shapes(offered, taken, 4, graph_tokens=n) for n in (8192, 0))
    assert {bucket(offered[i].tokens) for i in chosen} == {1, 4, 128, 1280}
    assert {bucket(offered[i].tokens) for i in eager} == {128, 1280}
    alike = next_shapes(offered[4:68], taken, 64, graph_tokens=8192)
    assert alike == list(range(64))  # as good as one another: in their order
    assert next_shapes(offered[4:68], taken, 64) != list(range(64))


def test_what_was_measured_is_not_offered_again() -> None:
    offered = shapes(40, 3)
    taken = run(THREE, offered[:30], 3)
    found = next_shapes(offered, taken, 20)
    assert sorted(found) == list(range(30, 40))
    assert next_shapes(offered[:30], taken, 5) == []


@pytest.mark.parametrize("num", [0, 2])
def test_before_anything_is_known_shapes_are_spread_by_tokens(num: int) -> None:
    offered = [Features(t, 0, 0, t, t, 1, 0) for t in (5, 1, 9, 3, 7)]
    taken = run(THREE, offered[:num], 1) if num else samples([], [])
    expected = {0: [1, 0, 2], 2: [3, 4, 2]}[num]
    assert next_shapes(offered, taken, 3) == expected


def test_candidates_that_are_all_dense_are_judged_next_to_steps_that_are_not() -> None:
    sparse = [Features(b, 500 * b, 500 * b, b, b, b, 0) for b in range(1, 16)]
    dense = [Features(128 * b, 128 * b * 500, 500 * b, 128 * b, 128 * b, b, 0) for b in range(1, 31)]
    taken = run(THREE, [*sparse, *dense[::2]], 1)
    assert len(next_shapes(dense, taken, 4)) == 4
