"""A kept replay answers only for the files that it was made from."""

import shutil
from pathlib import Path

from dsim.planner.contents import contents_of
from dsim.results.scenario import Scenario
from tests.cli.command import dsim as command

COMPILED = Path(__file__).parents[2] / "examples" / "policies" / "compiled_rule.py"


def edited(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_every_file_that_a_scenario_names_counts_by_what_it_holds(tmp_path: Path) -> None:
    code, settings, lengths = tmp_path / "mine.py", tmp_path / "mine.toml", tmp_path / "lengths.jsonl"
    shutil.copy(COMPILED, code)
    settings.write_text(f'policy = "{code}:POLICY"\ncalm = 4\n')
    lengths.write_text('{"arrival": 0.0, "input_length": 10, "output_length": 32}\n')
    policy = f"{settings}@h100-sdar-8b"
    scenario = Scenario("azure-conv", policy, fit="mooncake-conv", lengths=f"{lengths},max_tokens=8192")
    assert set(contents_of(scenario)) == {"trace", "profile", "fit", "lengths", "policy", "policy file"}
    for path, before, after in ((code, "= 32\n", "= 16\n"), (settings, "calm = 4", "calm = 8"), (lengths, "10", "20")):
        held = contents_of(scenario)
        edited(path, before, after)
        now = contents_of(scenario)
        assert [name for name in held if held[name] != now[name]] == [
            {code: "policy file", settings: "policy", lengths: "lengths"}[path]
        ]


def test_a_plans_folder_of_other_lengths_is_refused(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"arrival": 0.0, "input_length": 40, "output_length": 32}\n' * 5)
    words = ["plan", "azure-conv", "--policy", "optimus", "--lengths", lengths, "--rate", "1", "--slo", "ttft=9s"]
    words += ["--num-requests", "40", "--as-given", "-o", tmp_path / "plan"]
    assert command(*words).code == 0
    edited(lengths, ": 40", ": 400")
    again = command(*words)
    assert again.code == 2
    assert "holds another plan: its files is" in again.err
