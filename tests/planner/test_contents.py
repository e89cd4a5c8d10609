"""A kept replay answers only for the files that it was made from."""

import shutil
from pathlib import Path

from dsim.planner.contents import contents_of
from dsim.results.scenario import Scenario

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
    scenario = Scenario("azure-conv", policy, lengths=f"{lengths},max_tokens=8192")
    assert set(contents_of(scenario)) == {"trace", "profile", "lengths", "policy", "policy file"}
    for path, before, after in ((code, "= 32\n", "= 16\n"), (settings, "calm = 4", "calm = 8"), (lengths, "10", "20")):
        held = contents_of(scenario)
        edited(path, before, after)
        now = contents_of(scenario)
        assert [name for name in held if held[name] != now[name]] == [
            {code: "policy file", settings: "policy", lengths: "lengths"}[path]
        ]
