"""The tree is lint clean and typed, and the documents say what is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dsim

ROOT = Path(__file__).parents[1]


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_ruff_has_nothing_to_say() -> None:
    assert run("ruff", "check", ".") == ""


def test_ruff_would_format_nothing() -> None:
    assert run("ruff", "format", "--check", ".") == ""


def test_the_package_is_typed(tmp_path: Path) -> None:
    # The repository's root is the package, whatever the folder is called.
    (tmp_path / "dsim").symlink_to(ROOT, target_is_directory=True)
    # Its cache lies in the checkout, where the next run finds it: it makes half a minute a second.
    cache = str(ROOT / ".mypy_cache")
    config = str(ROOT / "pyproject.toml")
    assert run("mypy", "--cache-dir", cache, "--config-file", config, "-p", "dsim", cwd=tmp_path) == ""


MISSPELT = """
from dsim.engine.policies.vllm import BudgetState
from dsim.policy import Replica, rule

@rule
def wrong(replica: Replica, policy: BudgetState, slot: int) -> None:
    replica.counters.pages_hold -= 1
    replica.sequences[slot].page = 0
    replica.requests[0].finnish = 1.0
    policy.columns[slot].wnated = policy.fields.max_num_batched_token
"""


def test_a_misspelt_field_of_a_record_is_an_error_of_types(tmp_path: Path) -> None:
    (tmp_path / "dsim").symlink_to(ROOT, target_is_directory=True)
    (tmp_path / "misspelt.py").write_text(MISSPELT)
    cache, config = str(ROOT / ".mypy_cache"), str(ROOT / "pyproject.toml")
    found = run("mypy", "--cache-dir", cache, "--config-file", config, "misspelt.py", cwd=tmp_path)
    names = re.findall(r'has no attribute "(\w+)"', found)
    assert names == ["pages_hold", "page", "finnish", "wnated", "max_num_batched_token"]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    tests = [line for block in commands for line in block.splitlines() if "pytest" in line]
    assert len(tests) == 1
    assert tests[0] in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {dsim.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "form", sorted(p.name for p in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if p.stem != "config")
)
def test_an_issue_form_says_what_it_is_for_and_asks_something(form: str) -> None:
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / form).read_text(encoding="utf-8")
    assert re.match(r"name: .+\ndescription: .+\nlabels: .+\nbody:\n  - type: ", text)
    assert "required: true" in text
