"""A policy in its engine's own words, from what its preset declares."""

from dataclasses import fields

import pytest

from dsim.engine.part import AXES
from dsim.engine.policy import PRESETS, settings_of
from dsim.planner.deploy import flags_of

SERVED = [name for name, preset in PRESETS.items() if preset.serve]


def test_a_policy_that_no_engine_serves_has_no_command() -> None:
    assert flags_of("optimus", 1) == {}


def test_whole_blocks_are_lmdeploys_flags() -> None:
    found = flags_of("lmdeploy-bd32,max_batch=64,threshold=0.8", 2)
    assert found["command"] == (
        "lmdeploy serve api_server MODEL --backend pytorch --tp 2 --dllm-block-length 32 "
        "--dllm-unmasking-strategy low_confidence_dynamic --dllm-confidence-threshold 0.8 --max-batch-size 64 "
        "--max-prefill-token-num 4096 --cache-block-seq-len 64"
    )
    assert found["unsaid"] == []


def test_what_no_flag_says_is_named() -> None:
    assert flags_of("lmdeploy-bd32,num_loops=4", 1)["unsaid"] == ["num_loops=4"]


def test_a_truth_is_one_flag_or_the_other_and_a_file_holds_what_has_none() -> None:
    sync, free = flags_of("sglang-sync,max_running_requests=16", 1), flags_of("sglang-fdfo", 1)
    assert " --no-dllm-fdfo" in sync["command"]
    assert " --max-running-requests 16" in sync["command"]
    assert " --dllm-fdfo" in free["command"]
    assert sync["config"] == ["block_size: 32", "threshold: 0.95"]
    joint = flags_of("sglang-joint,edit_threshold=0.2", 1)
    assert joint["config"] == ["block_size: 32", "threshold: 0.5", "edit_threshold: 0.2", "max_post_edit_steps: 16"]


@pytest.mark.parametrize("name", SERVED)
def test_every_flag_is_of_a_field_that_the_policy_has(name: str) -> None:
    preset = PRESETS[name]
    known = {f.name for axis in AXES for f in fields(getattr(preset.policy, axis))} | {"gpus"}
    assert set(preset.flags) <= known
    assert set(settings_of(preset.policy)) & set(preset.flags)
    assert "MODEL" in flags_of(name, 1)["command"]
