"""Files that travel with work to machines that do not have them."""

import os
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dsim.engine.errors import DsimError
from dsim.planner.contents import asked_of
from dsim.planner.travel import LASTS, as_named, as_placed, packed, place, unpacked
from dsim.profiler.profile import load, save
from dsim.results.scenario import Scenario, named_code
from dsim.traces import synth, write

EXAMPLES = Path(__file__).parents[2] / "examples"

pytest.importorskip("ray", reason="the extra `cluster` is not installed")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of files on the machine where work is given out; the other machine's is empty."""
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "there"))
    own = tmp_path / "here"
    own.mkdir()
    write(synth("poisson", num_requests=30, rate=2.0, lengths="fixed:64,32", seed=1), own / "mine.jsonl")
    save(replace(load("a100-sdar-8b"), name="mine"), own / "mine.json")
    for folder, name in (("policies", "compiled_rule"), ("fleet", "router"), ("fleet", "scaler"), ("fleet", "decider")):
        shutil.copy(EXAMPLES / folder / f"{name}.py", own)
    (own / "plain.toml").write_text('policy = "chunk"\nchunk = 4\n')
    return own


def scenarios(here: Path) -> list[Scenario]:
    rule, router, scaler = f"{here}/compiled_rule.py:POLICY", f"{here}/router.py:MostFreePages", "scaler.py:ByTokens"
    code = named_code([rule, router, f"{here}/{scaler}"])
    one = Scenario(f"{here}/mine.jsonl", rule, f"{here}/mine.json", router=router, replicas=2, allow_code=code)
    return [
        one,
        replace(one, policy=f"{here}/plain.toml", router="jsq", scaler=f"{here}/{scaler}"),
        replace(one, policy="optimus", profile="a100-sdar-8b", replicas=1, pools=(f"2@{here}/mine.json,{rule}",)),
        Scenario("azure-conv", "chunk", num_requests=30),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_scenario_runs_where_none_of_its_files_is(here: Path) -> None:
    before = scenarios(here)
    expected = [(asked_of(one), one.run().to_json()) for one in before]
    data, files = packed([before, partial(Scenario.run, before[0])])
    contents = {name: path.read_bytes() for name, path in files.items()}
    shutil.rmtree(here)
    place({name: partial(contents.__getitem__, name) for name in contents})
    arrived, run = unpacked(data)
    assert str(here) not in repr(arrived)
    assert [(asked_of(one), one.run().to_json()) for one in arrived] == expected
    assert run().to_json() == expected[0][1]


def test_a_message_names_the_file_as_it_was_given(here: Path) -> None:
    (here / "mine.jsonl").write_text('{"arrival": 0}\n')
    data, files = packed(scenarios(here)[0])
    place({name: path.read_bytes for name, path in files.items()})
    with pytest.raises(DsimError) as caught:
        unpacked(data).requests()
    named = {name: str(path) for name, path in files.items()}
    assert as_named(as_placed(str(caught.value)), named).startswith(f"{here}/mine.jsonl")


def test_code_that_the_user_did_not_name_is_not_allowed_there_either(here: Path) -> None:
    data, files = packed(replace(scenarios(here)[0], allow_code=frozenset()))
    place({name: path.read_bytes for name, path in files.items()})
    with pytest.raises(DsimError, match="asks for code in"):
        unpacked(data).run()


def test_files_are_sent_for_once_and_go_when_nothing_needs_them(here: Path) -> None:
    _, files = packed(scenarios(here)[0])
    sent: list[str] = []

    def contents(name: str) -> bytes:
        sent.append(name)
        return files[name].read_bytes()

    work = {name: partial(contents, name) for name in files}
    place(work)
    place(work)
    assert sorted(sent) == sorted(files)
    (folder,) = (Path(tempfile.gettempdir())).iterdir()
    first = next(iter(files))
    os.utime((folder / first).parent, (0, LASTS))
    place({name: of for name, of in work.items() if name != first})
    assert not (folder / first).exists()
