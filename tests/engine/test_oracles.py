"""The presets schedule as the engines' own schedulers did, in recorded scenarios (benchmarks/oracles/run.py)."""

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest

from dsim.benchmarks.oracles.compare import difference, play
from dsim.benchmarks.oracles.run import UnavailableError, command

RECORDED = sorted((Path(__file__).parent / "oracles").glob("*.xz"))
LONG = ("sglang-published", "sglang-gemma")


def pairs(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Scenarios and the engine's recordings of them."""
    lines = [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    return list(zip(lines[::2], lines[1::2], strict=True))


def test_an_engine_is_started_without_the_folder_s_files_and_a_failure_is_its_own_line() -> None:
    script = "import os, sys; sys.exit('ERROR: safe path ' + os.environ['PYTHONSAFEPATH'])"
    with pytest.raises(UnavailableError, match=r"^cannot be installed: ERROR: safe path 1$"):
        command(sys.executable, "-c", script)


@pytest.mark.usefixtures("uncompiled")  # the published runs are long enough to be compiled
@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in LONG)) for p in RECORDED]
)
def test_a_preset_schedules_step_by_step_as_its_engine_did(path: Path) -> None:
    found = {scenario["seed"]: difference(recording, play(scenario)) for scenario, recording in pairs(path)}
    assert {seed: why for seed, why in found.items() if why} == {}
