"""The presets schedule as the engines' own schedulers did, in recorded scenarios (benchmarks/oracles/run.py)."""

import json
import lzma
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsim.benchmarks.oracles import run
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
    assert {path.stem for path in RECORDED} == {name for engine in run.ENGINES.values() for name in engine.families}
    for path in RECORDED:
        if not path.stem.startswith("sglang"):  # SGLang preempts nobody
            assert sum(any(step["preempted"] for step in recording["steps"]) for _, recording in pairs(path)) >= 2


ROW = {"preset": "p", "variation": "v", "scenarios": 1, "steps": 2, "identical": 1, "error": 0, "worst": 0, "first": ""}


def test_an_engine_that_cannot_be_installed_is_named_in_a_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {
        "pip": "WARNING: no\nERROR: no x==9 (from versions: 0.1.3, 0.5.23)\nERROR: none",
        "bug": "ERROR: Exception:\nTraceback (most recent call last):\nKeyError: 1",
    }

    def fails(folder: Path, release: str) -> None:
        if release == "full":
            raise OSError("disk is full")
        run.command(sys.executable, "-c", f"import sys; sys.exit({failures[release]!r} if sys.flags.safe_path else '')")

    compare = run.compare
    monkeypatch.setitem(run.ENGINES, "sglang", replace(run.ENGINES["sglang"], environment=fails))
    monkeypatch.setattr(run, "compare", lambda name, *asked: [ROW] if name == "lmdeploy" else compare(name, *asked))
    for release, line in ("full", "disk is full"), ("pip", "ERROR: no x==9 (newest: 0.5.23)"), ("bug", "KeyError: 1"):
        monkeypatch.setattr(sys, "argv", ["run.py", "sglang", "lmdeploy", "--release", f"sglang={release}"])
        assert run.main() == 1
        out, err = capsys.readouterr()
        assert err == f"sglang {release} cannot be installed: {line}\n"
        assert out.splitlines()[2].startswith("| `p` |")
