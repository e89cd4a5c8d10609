"""Host time that may be the device's: which fits say so, and what the ensemble makes of it."""

from dataclasses import replace

import pytest

from dsim.engine.errors import ProfileError
from dsim.engine.latency import Features, LatencyModel
from dsim.planner.record import profile_notes
from dsim.profiler.fit import fit_latency
from dsim.profiler.profile import from_json, load, to_json
from dsim.profiler.samples import samples
from dsim.profiler.uncertainty import HOST_OR_DEVICE, causes, varied
from dsim.results.scenario import Scenario

H20 = "h20-llada2.1-mini-sglang"
KNOWN = LatencyModel(((32.0, 0.005), (512.0, 0.012)), 3e-5, attention=1e-9, host_step=1e-3, host_request=4e-4)
STEPS = [
    Features(width * rows, width * rows * keys, rows * keys, 0, 0, rows, 0)
    for width in (4, 16, 32) for rows in (1, 2, 4, 8, 16, 32) for keys in (100, 400, 1600, 3000)
]  # fmt: skip


def test_only_a_log_with_the_device_s_times_tells_a_row_s_host_time_from_its_device_time() -> None:
    latency = [KNOWN.step(step) for step in STEPS]
    device = [replace(KNOWN, host_step=0.0, host_request=0.0).step(step) for step in STEPS]
    model, fit = fit_latency(samples(STEPS, latency))
    assert (model.host_request, fit.host_or_device) == (pytest.approx(4e-4, rel=0.05), ("host_request",))
    model, fit = fit_latency(samples(STEPS, latency, device))
    assert (model.host_step, model.host_request) == pytest.approx((1e-3, 4e-4), rel=1e-3)
    assert fit.host_or_device == ()


def test_the_ensemble_moves_unknown_host_time_to_the_device() -> None:
    profile = load(H20)
    assert [c.why for c in causes(profile, None) if c.name == HOST_OR_DEVICE] == [
        "unknown: 0 to all of host_request (1.1 ms) is the device's"
    ]
    rows = Features(32 * 16, 32 * 16 * 250, 16 * 250, 0, 0, 16, 0)
    known = profile.latency
    for score, share in ((-8.0, 0.0), (0.0, 0.5), (8.0, 1.0)):
        moved = varied(profile, [(HOST_OR_DEVICE, score)], None).latency
        assert moved.host_request == pytest.approx(known.host_request * (1 - share), abs=1e-9)
        assert moved.step(rows) == pytest.approx(known.step(rows), rel=1e-9)  # exposed, both are as long
        # Hidden, the longer of the two counts.
        host = known.host_step + 16 * moved.host_request
        hidden = replace(moved, overlap=True).step(rows)
        assert hidden == pytest.approx(max(host, known.step(rows) - host), rel=1e-9)


def test_a_step_s_host_time_moves_to_every_forward() -> None:
    profile = load(H20)
    both = replace(profile, fit=replace(profile.fit, host_or_device=("host_step", "host_request")))
    moved = varied(both, [(HOST_OR_DEVICE, 8.0)], None).latency
    rows = Features(64, 64 * 250, 500, 0, 0, 2, 0)
    assert (moved.host_step, moved.host_request) == pytest.approx((0.0, 0.0), abs=1e-9)
    assert moved.step(rows) == pytest.approx(profile.latency.step(rows), rel=1e-9)


def test_a_report_says_that_host_and_device_are_not_told_apart() -> None:
    asked = Scenario("azure-conv", "sglang-joint", profile=H20, num_requests=2)
    assert any(
        "cannot tell whether host_request is the host's time or the device's" in s for s in profile_notes([asked])
    )
    assert not any("cannot tell" in s for s in profile_notes([replace(asked, policy="ar", profile="a100-sdar-8b")]))


def test_only_terms_of_the_host_may_be_the_device_s() -> None:
    data = to_json(load(H20))
    assert isinstance(data, dict)
    data["latency"]["host_or_device"] = ["slope"]
    with pytest.raises(ProfileError, match=r'latency.host_or_device\[0\] is "slope", expected one of host_step, host'):
        from_json(data, "p.json")
