"""dsim policies and profiles: what there is, and what it means."""

import math

import numpy as np
import pytest

from dsim.cli.screen import print_json
from dsim.engine.spec import PRESETS
from dsim.profiler.profile import load, shipped

from .command import dsim


def test_policies_are_listed_one_line_each_with_their_main_parameter() -> None:
    ran = dsim("policies")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    for line, (name, preset) in zip(lines, PRESETS.items(), strict=False):
        assert line.split() == [f"{name}[:{preset.main}]", *preset.summary.split()]
    assert lines[len(PRESETS)] == ""
    # Each field that it names is one that some policy takes.
    fields = lines[-1].removesuffix(".").rpartition(" are ")[2].split(", ")
    assert {"max_batch", "chunk", "num_blocks", "threshold", "num_pages"} <= set(fields)
    assert len(lines) == len(PRESETS) + 2


def test_policies_as_json_hold_every_axis() -> None:
    listed = dsim("policies --json").json
    assert list(listed) == list(PRESETS)
    assert listed["chunk"]["granularity"] == {"kind": "FixedChunk", "chunk": 8, "block_length": 32, "num_blocks": 1}
    for axes in listed.values():
        assert list(axes) == [
            "name",
            "batching",
            "granularity",
            "eviction",
            "cache",
            "unmasking",
            "memory",
            "discipline",
        ]


def test_profiles_are_listed_one_line_each_and_say_that_they_are_estimates() -> None:
    ran = dsim("profiles")
    assert (ran.code, ran.err) == (0, "")
    assert [line.split()[0] for line in ran.out.splitlines()] == list(shipped())
    needed = ["a100-sdar-8b", "a100-llada2-mini", "a100-sdar-8b/graphs", "l40s-llada-8b", "rtx4090-llada-8b"]
    assert set(needed) <= set(shipped())
    for line in ran.out.splitlines():
        assert ("(estimated, not measured)" in line) == load(line.split()[0]).is_estimate
    assert "workload sharegpt-focus, as its step times" in ran.out  # a100-sdar-8b
    assert "workload evaluation, step times under 5.33 (fixed-48)" in ran.out  # DiffusionGemma
    assert "workload sharegpt-focus, step times under unknown ones" in ran.out  # data sheets
    assert dsim("profiles --json").json == shipped()


def test_what_is_no_number_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"rate": math.inf, "cv": [np.float64("nan"), -math.inf, 0.5], "n": np.int64(3)})
    assert capsys.readouterr().out == '{"rate": null, "cv": [null, null, 0.5], "n": 3}\n'
