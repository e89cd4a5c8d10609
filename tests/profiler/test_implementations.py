"""Implementations of a profile: which one a policy runs on, what it costs, and what a report says without one."""

import math
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from dsim.engine.errors import ProfileError
from dsim.engine.spec import parse
from dsim.planner.contents import asked_of
from dsim.planner.record import profile_notes
from dsim.profiler.hardware import gpu
from dsim.profiler.models import model
from dsim.profiler.profile import HOST_TIMES, Implementation, as_run_by, implemented, load, save
from dsim.profiler.roofline import roofline
from dsim.profiler.uncertainty import IMPLEMENTATION, MEMORY, causes, varied
from dsim.results.world import World

from ..checks import cases
from ..worlds import refusal

BASE = World("azure-conv", "ar", num_requests=4)
SERVED = ("launch of 28 x 1 ms, measured: a run of ours",)


def costs(policy: str, profile: str) -> tuple[str, float, float, float]:
    found = replace(BASE, policy=policy, profile=profile).loaded_profile()
    latency = found.latency
    return found.name, round(latency.launch, 9), latency.host_step, latency.host_request


@cases(
    "policy profile wanted",
    # A script's floor is in proportion to layers: 46 ms for 32.
    ("fast-dllm", "rtx4090-48gb-llada-8b", ("rtx4090-48gb-llada-8b/fast-dllm", 0.046, 0.0, 0.0)),
    ("fast-dllm:prefix", "rtx4090-dream", ("rtx4090-dream/fast-dllm", 0.04025, 0.0, 0.0)),
    ("dllm-cache", "rtx4090-dream", ("rtx4090-dream/dllm-cache", 0.04025, 0.0, 0.0)),
    ("sparse-dllm", "rtx4090-dream", ("rtx4090-dream/sparse-dllm", 0.0224, 0.0, 0.0)),
    ("dllm-serve", "rtx4090-dream", ("rtx4090-dream/dllm-serve", 0.0224, 0.0, 0.005)),
    ("sglang-fdfo", "h100-sdar-8b", ("h100-sdar-8b/sglang", 0.0005, 0.0015, 0.0001)),
    ("lmdeploy-0.18", "h100-sdar-8b", ("h100-sdar-8b/lmdeploy", 0.0005, 0.001, 1e-05)),
    # The profile's own where it holds none of that name, and where another one is named.
    ("sparse-dllm", "rtx4090-48gb-llada-8b", ("rtx4090-48gb-llada-8b", 0.0256, 0.0, 0.0)),
    ("vanilla", "rtx4090-48gb-llada-8b", ("rtx4090-48gb-llada-8b", 0.0256, 0.0, 0.0)),
    # An engine's on another GPU where a data sheet holds none.
    ("sglang-fdfo", "h200-sdar-8b", ("h200-sdar-8b/sglang", 0.0005, 0.0015, 0.0001)),
    ("fast-dllm", "rtx4090-dream/sparse-dllm", ("rtx4090-dream/sparse-dllm", 0.0224, 0.0, 0.0)),
    ("fast-dllm@rtx4090-dream/dllm-serve", "h100-sdar-8b", ("rtx4090-dream/dllm-serve", 0.0224, 0.0, 0.005)),
)
def test_a_policy_runs_at_the_costs_of_its_implementation(
    policy: str, profile: str, wanted: tuple[str, float, float, float]
) -> None:
    assert costs(policy, profile) == wanted


def test_an_implementation_has_the_settings_of_its_own() -> None:
    assert load("a100-sdar-8b/graphs").provenance.settings == {}  # not calibrated to the other's yield


def test_an_engine_s_steps_hide_its_host_where_it_plans_ahead() -> None:
    for spec, hides in (("lmdeploy-0.18", True), ("sglang-fdfo", False)):
        setting = replace(BASE, policy=spec, profile="h100-sdar-8b").setting()
        assert setting.step_model(None).latency.overlap == hides


def test_a_report_says_whose_costs_a_policy_s_implementation_has() -> None:
    said = "a100-sdar-8b/graphs does not hold the costs of sglang: steps cost what its own implementation takes"
    assert profile_notes([replace(BASE, policy="sglang-fdfo", profile="a100-sdar-8b/graphs")]) == [
        f"{said} (roofline with captured graphs)"
    ]
    assert profile_notes([replace(BASE, policy="sglang-fdfo", profile="h200-sdar-8b")]) == [
        "h200-sdar-8b/sglang takes the engine's host time from h100-sdar-8b/sglang, another build or GPU: `dsim replay "
        "--ensemble 19` shows how much that may change"
    ]
    for policy, profile in (("sglang-fdfo", "h100-sdar-8b"), ("lmdeploy-bd32", "a100-sdar-8b"), ("ar", "h200-sdar-8b")):
        assert profile_notes([replace(BASE, policy=policy, profile=profile)]) == []


def test_a_data_sheet_has_its_engine_s_host_time_on_every_gpu() -> None:
    edits, joint, own = model("LLaDA2.1-mini"), parse("sglang-joint:1"), load("h20-llada2.1-mini-sglang")
    h20, h100, b200 = (as_run_by(roofline(gpu(name), edits), joint) for name in ("H20", "H100", "B200"))
    assert h20.latency == own.latency
    for found in (h100, b200):
        builds = f"{own.name} and h200x2-diffusiongemma/sglang (geometric mean)"
        assert found.provenance.settings == {"costs_of": builds}
        # Of a forward of one row, 6.55 and 1.6 ms, in the parts of the nearer build.
        times, own_times = (attrgetter(*HOST_TIMES)(each.latency) for each in (found, own))
        assert times == pytest.approx(math.sqrt(1.6 / 6.55) * np.array(own_times), rel=1e-5)
    sglang, fdfo = load("h100-sdar-8b/sglang"), parse("sglang-fdfo")
    slow = replace(sglang, name="v1", implementations=(), latency=sglang.latency.scaled(1.2))  # as a follower fits it
    assert as_run_by(slow, fdfo) == slow
    # As uncertain as an engine's profiles differ, and not by the device's time.
    (why,) = (cause.why for cause in causes(b200, None) if cause.name == IMPLEMENTATION)
    assert why == "±100 % of launch and host terms: two codes take 1.6 and 6.55 ms a forward"
    moved = varied(b200, [(IMPLEMENTATION, math.sqrt(0.5)), (MEMORY, 1.0)], None).latency
    assert (moved.host_step, moved.sequence) == pytest.approx((own.latency.host_step, own.latency.sequence), rel=1e-5)


def test_a_file_s_own_implementations_are_read_from_another_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = Implementation("mine", "our fork", {"latency": {"launch": 0.028, "overlap": True}}, SERVED)
    save(replace(load("h200-sdar-8b"), implementations=(own,)), "p.json")
    assert load("p.json").implementations == (own,)
    found = load("p.json/mine")
    assert (found.name, found.implementation, found.implementations) == ("h200-sdar-8b/mine", "our fork", ())
    assert (found.latency.launch, found.latency.overlap) == (0.028, True)
    assert found.provenance.sources[-1] == "launch of 28 x 1 ms, measured: a run of ours"
    world = replace(BASE, profile="p.json/mine").located()
    assert world.profile == f"{tmp_path}/p.json/mine"
    # A stored replay of one is none of the other.
    assert asked_of(world) != asked_of(replace(BASE, profile="p.json"))


def test_an_implementation_that_is_not_held_is_named_with_those_that_are() -> None:
    assert refusal(ProfileError, load, "h100-sdar-8b/trt") == (
        "profile h100-sdar-8b holds implementations: sglang, vllm, lmdeploy, sglang-drafts, dsim; this run asks for trt"
    )


def test_what_an_implementation_replaces_is_checked_when_it_is_used() -> None:
    wrong = Implementation("mine", "ours", {"latency": {"slope": -1.0}})
    with pytest.raises(ProfileError, match=r"implementation mine of h200-sdar-8b: latency.slope is -1.0, expected at"):
        implemented(replace(load("h200-sdar-8b"), implementations=(wrong,)), "mine")
