"""The presets schedule as the engines' own schedulers did, in recorded scenarios (benchmarks/oracles/run.py)."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from dsim.benchmarks.oracles.compare import difference, play

RECORDED = sorted((Path(__file__).parent / "oracles").glob("*.xz"))


def pairs(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Scenarios and the engine's recordings of them."""
    lines = [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    return list(zip(lines[::2], lines[1::2], strict=True))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_preset_schedules_step_by_step_as_its_engine_did(path: Path) -> None:
    found = {scenario["seed"]: difference(recording, play(scenario)) for scenario, recording in pairs(path)}
    assert {seed: why for seed, why in found.items() if why} == {}


def test_recordings_of_every_family_are_kept_and_those_of_engines_that_preempt_do() -> None:
    stems = {path.stem for path in RECORDED}
    assert {"lmdeploy-0.18", "sglang-fdfo", "sglang-sync", "sglang-joint", "sglang-gemma"} <= stems
    assert {"vllm-ar", "vllm-ar-spec", "vllm-diffusion"} <= stems
    for path in RECORDED:
        if not path.stem.startswith("sglang"):  # SGLang preempts nobody
            assert all(any(step["preempted"] for step in recording["steps"]) for _, recording in pairs(path))
