"""The presets decide as the engines' own schedulers did: in recorded scenarios, and in recorded step logs.

oracles/ is of benchmarks/oracles/run_oracles.py. recorded/ holds parts of what benchmarks/vllm_diffusion_cpu.sh
recorded of vLLM 0.32's own engine on a CPU on 2026-11-24 to 26, named by their cases (benchmarks/validation.md): a tiny
DiffusionGemma with canvases of 64 tokens, its requests limited to 2 to 12 denoising steps a canvas. `eos` is of a
trained model, whose answers end early.
"""

import json
import lzma
import sys
from pathlib import Path

import pytest

from dsim.benchmarks.oracles.differences import difference, play
from dsim.benchmarks.oracles.run_oracles import UnavailableError, command
from dsim.benchmarks.vllm_diffusion.plans import Log, differences
from dsim.traces import load

RECORDED = sorted((Path(__file__).parent / "oracles").glob("*.xz"))
LONG = ("sglang-published", "sglang-gemma")


def test_an_engine_is_started_without_the_folder_s_files_and_a_failure_is_its_own_line() -> None:
    script = "import os, sys; sys.exit('ERROR: safe path ' + os.environ['PYTHONSAFEPATH'])"
    with pytest.raises(UnavailableError, match=r"^cannot be installed: ERROR: safe path 1$"):
        command(sys.executable, "-c", script)


@pytest.mark.usefixtures("uncompiled")  # the published runs are long enough to be compiled
@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in LONG)) for p in RECORDED]
)
def test_a_preset_schedules_step_by_step_as_its_engine_did(path: Path) -> None:
    lines = [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    pairs = zip(lines[::2], lines[1::2], strict=True)  # scenarios, and the engine's recordings of them
    found = {scenario["seed"]: difference(recording, play(scenario)) for scenario, recording in pairs}
    assert {seed: why for seed, why in found.items() if why} == {}


LOGS = sorted((Path(__file__).parent / "recorded").glob("vllm-diffusion-*.xz"))


def unpacked(path: Path, folder: Path) -> Path:
    (folder / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
    return folder / path.stem


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_each_step_of_a_recorded_engine_is_planned_as_it_was(path: Path, tmp_path: Path) -> None:
    file = unpacked(path, tmp_path)
    log = Log(file)
    assert len(log.steps) > 25
    assert differences(log, load(file) if log.setting.policy.memory.prefix_caching else None) == []


def test_a_step_that_was_planned_otherwise_is_named(tmp_path: Path) -> None:
    path = unpacked(Path(__file__).parent / "recorded" / "vllm-diffusion-async.jsonl.xz", tmp_path)
    lines = path.read_text().splitlines()
    wrong = len(lines) // 2
    step = json.loads(lines[wrong])
    lines[wrong] = json.dumps(step | {"pages": step["pages"] + 1})
    path.write_text("\n".join(lines))
    (found,) = differences(Log(path))
    assert found.endswith(f"pages {step['pages']}, vLLM {step['pages'] + 1}")
    # Decided without looking ahead.
    path.write_text("\n".join(lines).replace('"async_scheduling": true', '"async_scheduling": false'))
    assert ": rows [" in differences(Log(path))[-1]
