"""The presets schedule as the engines' own schedulers did, in recorded scenarios (benchmarks/oracles/run.py)."""

import importlib
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest

from dsim.benchmarks.oracles.compare import difference, play

RECORDED = sorted((Path(__file__).parent / "oracles").glob("*.xz"))
LONG = ("sglang-published", "sglang-gemma")


def pairs(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Scenarios and the engine's recordings of them."""
    lines = [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    return list(zip(lines[::2], lines[1::2], strict=True))


@pytest.mark.usefixtures("uncompiled")  # the published runs are long enough to be compiled
@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in LONG)) for p in RECORDED]
)
def test_a_preset_schedules_step_by_step_as_its_engine_did(path: Path) -> None:
    found = {scenario["seed"]: difference(recording, play(scenario)) for scenario, recording in pairs(path)}
    assert {seed: why for seed, why in found.items() if why} == {}


def test_recordings_of_every_family_are_kept_and_those_of_engines_that_preempt_do() -> None:
    stems = {path.stem for path in RECORDED}
    assert {"lmdeploy-0.18", "sglang-fdfo", "sglang-sync", "sglang-joint", "sglang-gemma"} <= stems
    assert {"vllm-ar", "vllm-ar-0.33", "vllm-ar-spec-0.33", "vllm-diffusion", "vllm-diffusion-0.33"} <= stems
    for path in RECORDED:
        if not path.stem.startswith("sglang"):  # SGLang preempts nobody
            assert sum(any(step["preempted"] for step in recording["steps"]) for _, recording in pairs(path)) >= 2


PIP = (
    "ERROR: Could not find a version that satisfies the requirement sglang==99.9 (from versions: 0.1.3, 0.5.23)\n"
    "ERROR: No matching distribution found for sglang==99.9"
)


def test_an_engine_that_cannot_be_installed_is_named_in_a_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "oracles"))
    run = importlib.import_module("run")
    row = {
        "preset": "p",
        "variation": "v",
        "scenarios": 1,
        "steps": 2,
        "identical": 1,
        "error": 0,
        "worst": 0,
        "first": "",
    }

    def compare(name: str, release: str, *_: Any) -> list[dict[str, Any]]:
        if name == "sglang":
            run.command(sys.executable, "-c", f"import sys; sys.exit({PIP!r})")
        return [{**row, "preset": f"{name} {release}"}]

    monkeypatch.setattr(run, "compare", compare)
    monkeypatch.setattr(
        sys, "argv", ["run.py", "sglang", "lmdeploy", "--release", "sglang=99.9", "--env", str(tmp_path)]
    )
    assert run.main() == 1
    out, err = capsys.readouterr()
    assert err == (
        "sglang 99.9 cannot be installed: ERROR: Could not find a version that satisfies the requirement sglang==99.9 "
        "(newest: 0.5.23)\n"
    )
    assert [line.split(" | ")[0] for line in out.splitlines()[2:]] == ["| `lmdeploy 0.18.0`"]
