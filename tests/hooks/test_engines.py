"""The hooks around the engines' own classes, where an environment holds them (benchmarks/hook_engines.py)."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import dsim
from dsim.profiler.steplog import policy_of, read_log

PYTHON = os.environ.get("DSIM_ENGINES_PYTHON")
# Preset, tokens of each request, steps of each block since the one before was handed out (four masks settle one by one,
# and a pass leaves the keys and values), and whether the last was that pass.
CASES = {
    "sglang": {
        "LowConfidence-sync": ("sglang-sync", [6, 6], [5, 5, 5, 5], True),
        "LowConfidence-fdfo": ("sglang-fdfo", [6, 6], [2, 5, 5, 5], True),
        "JointThreshold-sync": ("sglang-joint", [6, 6], [5, 5, 5, 5], False),
        "JointThreshold-fdfo": ("sglang-joint", [6, 6], [2, 5, 5, 5], False),
    },
    "lmdeploy": {"lmdeploy": ("lmdeploy-0.18", [6, 6], [1, 4, 5, 5], False)},
}


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="needs a Python beside which SGLang and LMDeploy lie, DSIM_ENGINES_PYTHON")
@pytest.mark.parametrize("engine", CASES)
def test_an_engines_own_classes_are_logged(tmp_path: Path, engine: str) -> None:
    script = Path(dsim.__file__).parent / "benchmarks" / "hook_engines.py"
    subprocess.run([str(PYTHON), script, engine, tmp_path], check=True)
    for name, (preset, tokens, steps, flushed) in CASES[engine].items():
        log = read_log(tmp_path / f"{name}.jsonl")
        assert policy_of(log.header)[0].split(",")[0] == preset
        assert log.requests.num_tokens.tolist() == log.requests.output_length.tolist() == tokens, name
        assert log.requests.canvases.num_steps.tolist() == steps, name
        assert log.requests.canvases.flushed.tolist() == [flushed] * len(steps), name
        assert (log.requests.finish >= log.requests.last_emission).all()
    if engine == "sglang":  # of a long, a short and one between, in this order, under examples/policies/dws.py
        assert json.loads((tmp_path / "admitted.json").read_text()) == ["short", "between"]
