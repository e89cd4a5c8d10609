"""CI runs what the README says, and the documents say what is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dsim

from .checks import cases

ROOT = Path(__file__).parents[1]


MISSPELT = """
from dsim.engine.policies.sglang_0_5 import RoundState
from dsim.engine.state import Replica
from dsim.policy import View, rule

@rule
def wrong(replica: Replica, policy: RoundState, slot: int) -> None:
    replica.counters.pages_hold -= 1
    replica.sequences[slot].page = 0
    replica.requests[0].finnish = 1.0
    policy.columns[slot].wnated = policy.record.bugdet

@rule
def mine(view: View) -> int:
    return view.num_wating
"""


@pytest.mark.slow
def test_a_misspelt_field_of_a_record_is_an_error_of_types(tmp_path: Path) -> None:
    # The repository's root is the package, whatever the folder is called.
    Path("dsim").symlink_to(ROOT, target_is_directory=True)
    Path("misspelt.py").write_text(MISSPELT)
    # The cache of `.ci/run`: it makes half a minute a second.
    options = ["--cache-dir", str(ROOT / ".mypy_cache"), "--config-file", str(ROOT / "pyproject.toml")]
    mypy = [sys.executable, "-m", "mypy", *options, "misspelt.py"]
    result = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False)
    names = re.findall(r'has no attribute "(\w+)"', result.stdout)
    assert names == ["pages_hold", "page", "finnish", "wnated", "bugdet", "num_wating"]


def test_ci_runs_the_test_command_of_the_readme_and_then_the_checkers_and_the_slow_lane() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if "pytest" in line]
    assert len(commands) == 1
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    later = lines[lines.index(commands[0]) + 1 :]
    pytest_command = commands[0].split(" && ")[-1]
    assert {".venv/bin/ruff check .", ".venv/bin/ruff format --check .", f"{pytest_command} -m slow"} <= set(later)
    assert any("mypy" in line and line.endswith(" -p dsim)") for line in later)


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {dsim.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@cases("form", *sorted(p.name for p in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if p.stem != "config"))
def test_an_issue_form_says_what_it_is_for_and_asks_something(form: str) -> None:
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / form).read_text()
    assert re.match(r"name: .+\ndescription: .+\nlabels: .+\nbody:\n  - type: ", text)
    assert "required: true" in text
