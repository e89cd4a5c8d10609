"""dsim sweep, from arguments to what is printed, written and refused."""

import json
import os
import signal
from pathlib import Path

import pytest

from dsim.planner.sweep import Sweep, sweep

from ..held_up import PATIENCE, SWEEP, start, wait_until
from ..stored import rows as stored
from .command import dsim, held, succeed

TOML = (
    '[base]\ntrace = "azure-conv"\npolicy = "chunk"\nnum_requests = 40\n[grid]\nrate = [1, 2]\npolicy.chunk = [4, 8]\n'
)
FILES = ["replays.db", "report.html", "results.csv", "sweep.json"]


@pytest.fixture(autouse=True)
def _files() -> None:
    Path("c.toml").write_text(TOML)


def test_a_sweep_ends_with_what_it_did_and_json_is_one_object_with_the_api_s_rows() -> None:
    ran = dsim("sweep c.toml -o runs/out --jobs 1")
    assert (ran.code, ran.out) == (0, "4 cells; 4 run; estimated, not measured (a100-sdar-8b)\n")
    assert ran.err == "Wrote runs/out/ (sweep.json, replays.db, results.csv, report.html)\n"
    assert held(Path("runs/out")) == FILES
    again = dsim("sweep c.toml -o runs/out --jobs 1")
    assert again.out == "4 cells; 0 run; 4 there already; estimated, not measured (a100-sdar-8b)\n"
    ran = dsim("sweep c.toml -o runs/out --jobs 1 --json --force")
    assert (ran.code, ran.json["num_cells"]) == (0, 4)
    done = sweep("c.toml", "runs/out")
    assert (ran.json["results"], done.num_reused) == (done.to_json()["results"], 4)
    kept = json.loads(Path("runs/out/sweep.json").read_text())
    assert Sweep.from_json(ran.json).to_json() == ran.json == kept | {"command": ran.json["command"]}
    assert [(row["rate"], row["policy.chunk"], row["spec"]) for row in ran.json["results"]] == [
        (1.0, 4, "chunk,chunk=4"), (1.0, 8, "chunk,chunk=8"), (2.0, 4, "chunk,chunk=4"), (2.0, 8, "chunk,chunk=8"),
    ]  # fmt: skip


def test_progress_counts_cells() -> None:
    cells: list[tuple[int, int]] = []
    sweep("c.toml", jobs=1, progress=lambda done, of: cells.append((done, of)))
    assert cells == [(n, 4) for n in range(5)]


def test_policies_that_commit_at_another_threshold_than_theirs_are_told_of_the_first_eight_by_name() -> None:
    rows = list(range(1, 11))
    base = 'base = {trace = "azure-conv", policy = "lmdeploy-0.18", num_requests = 2}'
    Path("c.toml").write_text(f"{base}\ngrid = {{policy.max_batch = {rows}}}\n")
    told = dsim("sweep c.toml -o out --jobs 1").err.splitlines()
    assert told[0] == (
        "Warning: lmdeploy-0.18,max_batch=1: threshold is 0.85, the engine's own, but a100-sdar-8b holds yields "
        "for sharegpt-focus at 0.9: these are used"
    )
    assert (told[8], len(told)) == ("Warning: 2 more policies need data that their profiles lack", 10)


def test_failed_cells_are_warned_of_and_a_sweep_of_nothing_else_fails() -> None:
    Path("c.toml").write_text(TOML.replace("policy.chunk = [4, 8]", "policy.num_pages = [1, 'none']"))
    ran = succeed("sweep c.toml -o out --jobs 1")
    assert "4 cells; 4 run; 2 failed; " in ran.out
    assert ran.err.count("none of its 40 requests fits") == 2
    Path("c.toml").write_text(TOML.replace("[grid]", "'policy.num_pages' = 1\n[grid]"))
    ran = dsim("sweep c.toml -o none --jobs 1")
    assert (ran.code, ran.err.splitlines()[3]) == (2, "Warning: 1 more cells failed: column error")
    assert ran.err.splitlines()[-1].startswith("Error: every cell failed; the first: cell ")
    assert held(Path("none")) == FILES


@pytest.mark.slow
def test_ctrl_c_leaves_a_folder_that_the_same_command_finishes() -> None:
    Path("c.toml").write_text(TOML.replace("[4, 8]", "[2, 4, 8, 16]"))
    running = start(SWEEP, "sweep", "c.toml", "-o", "out", "--jobs", 2, folder=Path("gate"), num_passes=3)
    wait_until(lambda: len(stored(Path("out/replays.db"))) == 3, running)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=PATIENCE)
    assert (running.returncode, out) == (130, "8 cells; 3 run; estimated, not measured (a100-sdar-8b)\n")
    assert err == (
        "Interrupted: 3 of 8 cells are finished and kept; to go on: dsim sweep c.toml -o out\n"
        "Wrote out/ (sweep.json, replays.db, results.csv, report.html)\n"
    )
    assert len(Path("out/results.csv").read_text().splitlines()) == 1 + 3
    assert "8 cells; 5 run; 3 there already; " in succeed("sweep c.toml -o out --jobs 1").out
