"""The tutorial, command by command as it is written, on less traffic; and `dsim policies SPEC`."""

import re
import shutil
from pathlib import Path

import pytest

from . import pages
from .command import dsim, held, rows

ROOT = pages.ROOT
TUTORIAL = ("docs/policy-of-your-own.md", "docs/policy-levels.md")


LATE = """from dsim.policy import *

@dataclass(frozen=True)
class Late(FixedChunk):
    def answers(self, policy):
        return {**super().answers(policy), hooks.choose: chunk}

@rule
def chunk(view):
    return 8 if view.now < 10 else view.running(10**6).priority

POLICY = Policy("late", EVERY_STEP, Late(), DelayedCache())
"""


def blocks(language: str, *tutorial: str) -> list[str]:
    return [block.text for page in tutorial or TUTORIAL for block in pages.blocks(page) if block.language == language]


def run_all(page: str, names: list[str]) -> None:
    """Run the page's commands, which are those of these names."""
    shown = [block for block in pages.blocks(page) if block.language == "sh"]
    commands = [pages.shrunk(line) for block in shown for line in block.lines]
    assert [command[0] for command in commands] == names
    for command in commands:
        ran = dsim(command)
        assert ran.code == 0, (command, ran.err)


@pytest.mark.slow
def test_every_command_of_the_tutorial_runs() -> None:
    [code] = blocks("python")
    assert code == (ROOT / "examples" / "policies" / "compiled_rule.py").read_text()
    Path("mine.py").write_text(code)
    Path("space.toml").write_text(blocks("toml")[0])
    run_all(TUTORIAL[0], ["policies", "replay", "tune", "replay", "live"])
    assert held(Path("runs/live")) == ["report.html", "requests.parquet", "run.json", "steps.parquet"]
    text = Path("runs/tuned/policy.toml").read_text()
    assert text.startswith(('policy = "optimus"\n', 'policy = "./mine.py:POLICY"\n'))
    tried = {row.split(",")[1].strip('"') for row in Path("runs/tuned/trials.csv").read_text().splitlines()[1:]}
    assert tried >= {"optimus", "./mine.py:POLICY"}


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_every_command_of_the_other_ways_to_write_a_rule_runs() -> None:
    shutil.copytree(ROOT / "examples" / "policies", "examples/policies")
    run_all(TUTORIAL[1], ["replay", "tune", "live"])


def test_the_fields_of_a_policy_are_listed_with_what_each_may_be_and_means() -> None:
    example = ROOT / "examples" / "policies" / "compiled_rule.py"
    ran = dsim("policies", f"{example}:POLICY:4")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].endswith(":POLICY:4: a chunk sized by the queue's length")
    assert lines[1] == "Source: docs/policy-of-your-own.md"
    assert "  calm = 4: requests, waiting or running, that get the largest chunk [1 to 64]" in lines
    as_json = dsim("policies chunk:16 --json").json
    assert (as_json["name"], as_json["main"]) == ("chunk:16", "chunk")
    assert next(field for field in as_json["fields"] if field["name"] == "chunk") == {
        "axis": "granularity", "name": "chunk", "default": 16, "bounds": "2 to 64",
        "meaning": "positions computed per sequence and step, at most the block",
    }  # fmt: skip
    from dsim.engine.spec import PRESETS

    for name, preset in PRESETS.items():
        ran = dsim("policies", name)
        assert ran.out.startswith(f"{name}: {preset.summary}\n")
        assert "no meaning given" not in ran.out, name


def test_a_policy_that_is_not_there_is_one_line_and_exit_2() -> None:
    said = dsim("replay azure-conv --policy ./none.py:POLICY").refusal
    assert said == "policy './none.py:POLICY': ./none.py cannot be read: No such file or directory"


def test_a_checked_rule_says_where_it_went_wrong_however_late() -> None:
    Path("mine.py").write_text(f"from dataclasses import dataclass; {LATE}")
    Path("trace.jsonl").write_text(rows(60))
    command = "replay trace.jsonl --policy ./mine.py:POLICY --check-rules"
    line = LATE[: LATE.index("running")].count("\n") + 1
    said = rf".*mine.py:{line}: chunk: IndexError: running\(1000000\) of \d+ requests"
    assert re.fullmatch(said, dsim(command).refusal)
    # Its own missing file is no failure of the machine.
    Path("mine.py").write_text(Path("mine.py").read_text().replace("view.running(10**6)", "open('none.csv')"))
    assert ": chunk: FileNotFoundError: " in dsim(command).refusal
