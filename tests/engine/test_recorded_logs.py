"""vllm-diffusion decides as vLLM 0.32's own engine did, in step logs recorded on a CPU.

recorded/ holds parts of what benchmarks/vllm_diffusion_cpu.sh recorded on 2026-11-24 to 26, named by their cases
(benchmarks/validation.md): a tiny DiffusionGemma with canvases of 64 tokens, its requests limited to 2 to 12 denoising
steps a canvas. `eos` and `all` are of a trained model, whose answers end early; `prefix-dense` and `all` keep all pages
of layers with a window (`--prefix-cache-retention-interval 128`), `prefix` those that vLLM keeps by default.
"""

import json
import lzma
from pathlib import Path

import pytest

from dsim.benchmarks.vllm_diffusion.plans import Log, differences
from dsim.traces import load

RECORDED = sorted((Path(__file__).parent / "recorded").glob("vllm-diffusion-*.xz"))


def unpacked(path: Path, folder: Path) -> Path:
    (folder / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
    return folder / path.stem


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
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
