"""Steps that an H100 and an H200 took (benchmarks/validation.md), by the fit and by profiles not fitted to them.

SDAR-8B's dimensions with random weights under dsim's own executor at ff9763d, PyTorch 2.11, decode steps and small
prefills captured; shapes in which all sequences are alike, and steps of serving, whose sequences differ. The H200's are
steps of serving four policies at b2f1fc6.
"""

import csv
from pathlib import Path

import numpy as np

from dsim.profiler.fit import predict
from dsim.profiler.profile import HeldOut, load, shipped
from dsim.profiler.samples import FEATURES, points
from dsim.research.calibration.refit_h100 import h100_steps


def test_half_of_the_served_steps_is_fitted_and_the_others_judge_by_kind() -> None:
    fit = load("h100-sdar-8b/dsim").fit
    assert (fit.num_points, fit.held_out, fit.doubts) == (269, HeldOut(81, 0.02579, 0.1023), ())
    assert [(error.num_points, error.kind, error.off, error.doubted) for error in fit.judged_by] == [
        (10, "prefills (1 sequence)", "1 to 8 % too fast", True),
        (19, "prefills (2 to 8 sequences)", "0 to 3 % too fast", False),
        (52, "decode steps above 256 tokens (more than 8 sequences)", "2 to 7 % too fast", True),
    ]


def test_the_measured_profile_borrows_its_yields_and_says_so() -> None:
    measured, estimate = load("h100-sdar-8b/dsim"), load("h100-sdar-8b")
    assert (measured.origin, measured.verdict, estimate.origin) == ("measured", "measured", "roofline")
    assert (measured.commits, measured.commit_fits) == (estimate.commits, ())
    assert "yields are published ones, not measured" in shipped()["h100-sdar-8b/dsim"]


def test_what_the_data_sheet_said_before_is_off_by_more_than_it_states_in_two_shapes_of_192() -> None:
    profile = load("h100-sdar-8b")
    seen = points(h100_steps("shape"))
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
