"""dsim validate and dsim profile --model, from arguments to files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsim.live.config import ModelConfig
from dsim.live.weights import random_model
from dsim.profiler.profile import load
from dsim.research.tiny.saved import save_model

from .command import dsim, held, succeed

pytestmark = pytest.mark.usefixtures("_budgets_of_processor_time")
SMALL = ModelConfig("small", 2, 48, 4, 2, 16, 80, 97, 128, 4, 96, rope_theta=1e4)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and prompts."""
    folder = tmp_path_factory.mktemp("shared")
    save_model(random_model(SMALL, "cpu", torch.float32), folder / "model", torch.float32)
    (folder / "ids.jsonl").write_text(json.dumps(list(range(90))) + "\n")
    return folder


@pytest.fixture
def full_sequence(shared: Path) -> Path:
    """A profile of the model under full-sequence policies, measured by the first test that asks for it."""
    file = shared / "p.json"
    if not file.exists():
        ran = dsim("profile --full-sequence --budget 2s --max-batch 4 -o", file, "--model", shared / "model")
        assert ran.code in (0, 1), ran.err  # 1: this machine's noise makes the fit doubt itself
    return file


@pytest.fixture(autouse=True)
def _with_the_model(shared: Path) -> None:
    shutil.copytree(shared / "model", "model")
    shutil.copy(shared / "ids.jsonl", "ids.jsonl")


@pytest.mark.slow
def test_a_profile_is_measured_and_then_validated() -> None:
    ran = dsim("profile --model model --budget 3s --prompts ids=ids.jsonl --thresholds 0.9 --max-batch 4 -o p.json")
    assert ran.code in (0, 1), ran.err  # 1: this machine's noise makes the fit doubt itself
    assert (ran.code == 1) == ("Not valid" in ran.out + ran.err)
    assert load("p.json").origin == "measured"
    assert "What does a step cost" in Path("p.html").read_text()
    rows = Path("p.csv").read_text().splitlines()[1:]
    assert len(rows) > (load("p.json").fit.num_points or 0)  # every step, of which the points are medians

    policies = "--policy lmdeploy-bd32:4,max_batch=4,page_size=8 --policy chunk:2,block_length=4,max_batch=4"
    command = f"validate --model model --profile p.json --lengths fixed:12,8 --load 0.3 --seconds 0.5 {policies} -o v"
    ran = succeed(command, "--json --bound mean:e2el=100000%")
    found = ran.json
    assert (found["schema"], len(found["comparison"]["cells"])) == ("dsim-validation", 2)
    assert found["noise"] is not None
    assert {"v/validation.json", "v/comparison/report.html"} <= set(held(Path()))
    assert len([json.loads(path.read_text()) for path in Path("v/cells").glob("*/predicted/run.json")]) == 2
    # A bound that is missed is said, and ends with 1; nothing is measured again.
    before = Path("v/cells/validation.json").read_bytes()
    ran = dsim(command, "--json --bound mean:e2el=0%")
    assert ran.code == 1
    assert "missed" in ran.err
    assert Path("v/cells/validation.json").read_bytes() == before


@pytest.mark.slow
def test_full_sequence_policies_are_validated_by_a_profile_of_their_own(full_sequence: Path) -> None:
    profile = load(full_sequence)
    assert (profile.family, profile.commits, profile.focus, profile.latency.eviction) == ("full-sequence", (), None, 0)
    ran = succeed(
        "validate --model model --profile", full_sequence, "--lengths", "fixed:12,8", "--load", 0.3,
        "--seconds", 0.3, "--policy", "sparse-dllm,block_length=4", "--policy",
        "dllm-serve,block_length=4,max_batch=4", "-o", "v", "--json",
    )  # fmt: skip
    cells = ran.json["comparison"]["cells"]
    assert [cell["num_both"] for cell in cells] == [cells[0]["num_both"]] * 2
    for cell in cells:  # the same steps yield the same tokens, here and there
        assert cell["totals"]["tpf"]["error"] == 0.0


@pytest.mark.slow
def test_a_profile_costs_at_most_half_more_than_its_budget_compiling_included() -> None:
    before = os.times()
    command = [sys.executable, "-m", "dsim", "profile", "--model", "tiny", "--budget", "30s", "-o", "p.json"]
    ran = subprocess.run(command, env=os.environ | {"NUMBA_CACHE_DIR": "new"}, capture_output=True, text=True)
    spent = os.times()
    assert ran.returncode in (0, 1), ran.stderr  # 1: this machine's noise makes the fit doubt itself
    assert spent.children_user + spent.children_system - before.children_user - before.children_system < 45


@pytest.mark.slow
def test_a_budget_in_which_no_cell_fits_is_refused(full_sequence: Path) -> None:
    command = "validate --model model --lengths fixed:12,8 --policy sparse-dllm,block_length=4 --load 0.9 -o v"
    said = dsim(command, "--budget 0.01s --profile", full_sequence).refusal
    assert said.startswith("sparse-dllm,block_length=4 at load 0.9 takes about")
