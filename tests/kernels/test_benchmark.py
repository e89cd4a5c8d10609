"""benchmarks/kernels.py: what it does without a GPU, and that its report says where it came from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dsim

SCRIPT = Path(dsim.__file__).parent / "benchmarks" / "kernels.py"
PATIENT = ("--smoke", "--seconds", "1e6")  # with the limit of a real run a busy machine leaves cases out
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA kernels are compiled, not interpreted")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_smoke_run_says_what_it_ran_on_and_times_every_way_that_a_kernel_lists(tmp_path: Path) -> None:
    done = run(*PATIENT, "--only", "confidence", "--tune", "--json", str(tmp_path / "kernels.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "kernels.json").read_text())
    assert (report["schema"], report["smoke"], report["torch"]) == (1, True, torch.__version__)
    assert {"device", "driver", "triton", "ceilings"} <= set(report)
    assert all(case["right"] for case in report["cases"])
    # The library computes the head's product.
    tuned = [case for case in report["cases"] if case["name"] == "confidence"]
    for case in tuned:
        seconds = [way["seconds"] for way in case["candidates"]]
        assert seconds == sorted(seconds)
        assert [way["launched"] for way in case["candidates"]].count(True) == 1
        assert {"of_ceilings", "of_floor", "state"} <= set(case)
    assert (report["left"], {row["shape"] for row in report["cases"] if row["name"] == "confidence"}) == (
        [], {"3 rows of 1000", "5 rows of 1000"},
    )  # fmt: skip
    ways = {way["how"] for way in tuned[0]["candidates"]}
    assert (len(ways), "Pass(block=4096, num_warps=8, programs=8)" in ways) == (4, True)
    assert done.stdout.count("<- launched") == len(tuned)
