"""Steps that an H100 and an H200 took (benchmarks/validation.md), by the fit and by profiles not fitted to them.

SDAR-8B's dimensions with random weights under dsim's own executor at ff9763d, PyTorch 2.11, decode steps and small
prefills captured; shapes in which all sequences are alike, and steps of serving, whose sequences differ. The H200's are
steps of serving four policies at b2f1fc6.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from dsim.engine.latency import Features
from dsim.live.padding import MAX_ROWS
from dsim.profiler.fit import fit_latency, predict
from dsim.profiler.profile import Fit, load
from dsim.profiler.samples import FEATURES, Samples, points, samples

with (Path(__file__).parent / "h100_sdar_8b.csv").open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))


def taken(of: str) -> Samples:
    rows = [row for row in ROWS if row["of"] == of]
    features = [Features(*(int(row[name]) for name in Features._fields[:8])) for row in rows]
    latency, device = (np.array([float(row[name]) for row in rows]) / 1e6 for name in ("latency_us", "device_us"))
    return samples(features, latency, device)


@pytest.fixture(scope="module")
def fit() -> Fit:
    return fit_latency(taken("shape"), graph_tokens=MAX_ROWS, stairs=True, journal=taken("served"))[1]


def test_a_fit_to_like_sequences_is_within_their_noise_and_doubted_where_served_ones_take_longer(fit: Fit) -> None:
    assert fit.num_points == 192
    assert fit.noise is not None
    assert fit.residual is not None
    assert fit.held_out is not None
    assert (fit.noise < 0.015, fit.residual < 0.03, 0.05 < fit.held_out.median < 0.07) == (True, True, True)
    assert [doubt.partition(":")[0] for doubt in fit.doubts] == ["held-out error"]


def test_what_the_data_sheet_said_before_is_off_by_more_than_it_states_in_two_shapes_of_192() -> None:
    profile = load("h100-sdar-8b")
    seen = points(taken("shape"))
    off = predict(profile.latency, seen.features) / seen.latency - 1.0
    assert profile.fit.relative_uncertainty == 0.3
    assert (np.abs(off) > 0.3).sum() == 2
    assert np.median(np.abs(off)) < 0.1


def test_what_the_data_sheet_said_of_steps_served_on_an_h200_is_too_fast_within_what_it_states() -> None:
    profile = load("h200-sdar-8b")
    with (Path(__file__).parent / "h200_served.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    features = np.array([[float(row.get(name, 0)) for name in FEATURES] for row in rows])
    off = predict(profile.latency, features) / np.array([float(row["latency_us"]) / 1e6 for row in rows]) - 1.0
    prefill = features[:, FEATURES.index("prefill_tokens")] > 0
    assert profile.fit.relative_uncertainty == 0.3
    assert -0.12 < np.median(off[~prefill]) < -0.08
    assert -0.21 < np.median(off[prefill]) < -0.15
    assert (np.abs(off) > 0.3).mean() < 0.02
