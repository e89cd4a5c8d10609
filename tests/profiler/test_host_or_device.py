"""Host time that may be the device's: which fits say so, and what the ensemble makes of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from dsim.engine.latency import Features, LatencyModel
from dsim.planner.record import profile_notes
from dsim.profiler.fit import fit_latency
from dsim.profiler.profile import load, save
from dsim.profiler.samples import samples
from dsim.profiler.uncertainty import HOST_OR_DEVICE, causes, varied
from dsim.results.world import World

H20 = load("h20-llada2.1-mini-sglang")
UNTOLD = replace(H20, fit=replace(H20.fit, host_or_device=True))  # as before its ratio of FDFO to sync
KNOWN = LatencyModel(((32.0, 0.005), (512.0, 0.012)), 3e-5, attention=1e-9, host_step=1e-3, host_request=4e-4)
STEPS = [
    Features(width * rows, width * rows * keys, rows * keys, 0, 0, rows, 0)
    for width in (4, 16, 32) for rows in (1, 2, 4, 8, 16, 32) for keys in (100, 400, 1600, 3000)
]  # fmt: skip


def test_only_a_log_with_the_device_s_times_tells_a_row_s_host_time_from_its_device_time() -> None:
    latency = [KNOWN.step(step) for step in STEPS]
    device = [replace(KNOWN, host_step=0.0, host_request=0.0).step(step) for step in STEPS]
    model, fit = fit_latency(samples(STEPS, latency))
    assert (model.host_request, fit.host_or_device) == (pytest.approx(4e-4, rel=0.05), True)
    model, fit = fit_latency(samples(STEPS, latency, device))
    assert (model.host_step, model.host_request) == pytest.approx((1e-3, 4e-4), rel=1e-3)
    assert not fit.host_or_device


def test_the_ensemble_moves_unknown_host_time_to_the_device() -> None:
    assert [c.why for c in causes(UNTOLD, None) if c.name == HOST_OR_DEVICE] == [
        "unknown: 0 to all of host_request (0.31 ms) is the device's"
    ]
    assert HOST_OR_DEVICE not in {c.name for c in causes(H20, None)}
    rows = Features(32 * 16, 32 * 16 * 250, 16 * 250, 0, 0, 16, 0)
    known = UNTOLD.latency
    for score, share in ((-8.0, 0.0), (0.0, 0.5), (8.0, 1.0)):
        moved = varied(UNTOLD, [(HOST_OR_DEVICE, score)], None).latency
        assert moved.host_request == pytest.approx(known.host_request * (1 - share), abs=1e-9)
        assert moved.step(rows) == pytest.approx(known.step(rows), rel=1e-9)  # exposed, both are as long
        # Hidden, the longer of the two counts.
        host = known.host_step + 16 * moved.host_request
        hidden = replace(moved, overlap=True).step(rows)
        assert hidden == pytest.approx(max(host, known.step(rows) - host), rel=1e-9)


def test_a_report_says_that_host_and_device_are_not_told_apart(tmp_path: Path) -> None:
    save(UNTOLD, tmp_path / "untold.json")
    asked = World("azure-conv", "sglang-joint", profile=str(tmp_path / "untold.json"), num_requests=2)
    assert "cannot tell whether host_request is the host's time or the device's" in profile_notes([asked])[-1]
    assert "cannot tell" not in str(profile_notes([replace(asked, policy="ar", profile="a100-sdar-8b")]))
