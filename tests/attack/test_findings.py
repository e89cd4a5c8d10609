"""What the attack and those before it found, one by one: each lost something, hung, or ended in a traceback."""

import json
import os
import warnings
from pathlib import Path

import pytest

from dsim.engine.errors import DsimError, MachineError, TraceError
from dsim.planner.record import in_twin, record
from dsim.planner.scenario import Scenario
from dsim.planner.sweep import sweep
from dsim.profiler.profile import SHIPPED
from dsim.profiler.profile import load as load_profile
from dsim.report.files import RunWriter
from dsim.report.run import read_run
from dsim.traces import load, prepare, synth

from . import disasters
from .targets import run_command

ROWS = [{"timestamp": 1000 * i, "input_length": 20, "output_length": 8} for i in range(5)]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines(Path("t.jsonl"), ROWS)


def lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dsim(*arguments: str) -> tuple[int, str]:
    """The exit code and the standard error of a command."""
    code, _, err = run_command(list(arguments), Path.cwd())
    return code, err


def test_a_search_with_a_mistaken_option_deletes_no_folder() -> None:
    Path("p").mkdir()
    Path("p/tune.json").write_text('{"objectives": {}, "winner": {}, "num_trials": 3}')
    for more in (("--train", "7"), ("--trials", "0"), ("--objective", "speed"), ("--backend", "moon")):
        code, _ = dsim("tune", "t.jsonl", "--slo", "ttft=1s", "-o", "p", "--force", *more)
        assert (code, os.listdir("p")) == (2, ["tune.json"])
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("years")
    code, err = dsim("tune", "t.jsonl", "--slo", "ttft=1s", "-o", "mine", "--force")
    assert (code, err) == (2, "Error: mine: holds thesis.tex, which is not of a search: choose another folder\n")
    assert Path("mine/thesis.tex").read_text() == "years"


def test_a_device_is_not_replaced() -> None:
    code, err = dsim("trace", "convert", "t.jsonl", "/dev/full", "--force")
    assert (code, err) == (2, "Error: /dev/full: is a device, expected the name of a file to write\n")
    assert Path("/dev/full").is_char_device()


def test_a_link_that_a_killed_search_left_does_not_hold_up_the_next_one() -> None:
    Path("p").mkdir()
    Path("p/study.journal").write_text("")
    Path("p/study.journal.lock").symlink_to("gone")
    code, err = dsim(
        "tune", "t.jsonl", "--slo", "ttft=9s", "-o", "p", "--trials", "1", "--replications", "2", "--policy", "ar",
        "--train", "0.5",
    )  # fmt: skip
    assert "Traceback" not in err
    assert not os.path.lexists("p/study.journal.lock"), (code, err)


@pytest.mark.parametrize("time", [1e17, 1e14])
def test_a_time_that_no_file_can_hold_is_refused(time: float) -> None:
    lines(Path("t.jsonl"), [*ROWS, {**ROWS[0], "timestamp": time}])
    code, err = dsim("trace", "convert", "t.jsonl", "out.jsonl", "--time-unit", "s")
    assert code == 2
    assert f"the last request arrives after {time:g} s, expected at most 1e+12 s" in err
    assert not Path("out.jsonl").exists()


def test_a_blank_date_is_no_time() -> None:
    Path("t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,9,4\n,9,4\n")
    with pytest.raises(TraceError, match=r"t.csv:3: TIMESTAMP is .*, expected a date and time"):
        load("t.csv")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--replicas", "20000"), "replicas is 20000, expected at most 4096"),
        (("--num-requests", "100000000"), "100000000"),
        (("--time-scale", "1e-320"), "time scale is 1e-320, expected 1e-09 to 1e+09"),
    ],
)
def test_work_without_bound_is_refused_with_both_values(more: tuple[str, ...], says: str) -> None:
    code, err = dsim("replay", "t.jsonl", "--arrival", "poisson" if more[0] == "--num-requests" else "trace", *more)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


def test_what_needs_more_memory_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.planner.scenario.free_memory", lambda: 1_000_000_000)
    with pytest.raises(DsimError, match=r"need about 6.0 GB of memory, expected at most the 1.0 GB that are free"):
        Scenario("t.jsonl", num_requests=10_000_000)
    assert Scenario("t.jsonl", num_requests=1_000_000).replicas == 1


@pytest.mark.parametrize("option", ["trace", "--profile", "--policy", "sweep", "--space", "--quality-table"])
@pytest.mark.parametrize("kind", ["pipe", "zero"])
def test_pipes_and_devices_are_no_inputs(option: str, kind: str) -> None:
    os.mkfifo("pipe.toml")
    path = {"pipe": "pipe.toml", "zero": "/dev/zero"}[kind]
    command = {
        "trace": ("replay", path), "sweep": ("sweep", path, "-o", "out"),
        "--space": ("tune", "t.jsonl", "--space", path), "--quality-table": ("tune", "t.jsonl", option, path),
    }.get(option, ("replay", "t.jsonl", option, path))  # fmt: skip
    code, err = dsim(*command)
    assert (code, err.count("\n")) == (2, 1), err


def test_a_profile_of_version_2_without_a_model_is_said_to_lack_it() -> None:
    held = json.loads((SHIPPED / "a100-sdar-8b.json").read_text())
    del held["model"]
    Path("p.json").write_text(json.dumps(held | {"version": 2}))
    with pytest.raises(DsimError, match=r"p.json: model is missing, expected keys"):
        load_profile("p.json")


def test_a_session_may_be_named_by_anything() -> None:
    lines(Path("t.jsonl"), [{**row, "session_id": ["a"], "delay": "soon"} for row in ROWS[:2]])
    with pytest.raises(TraceError, match="delay is"):
        load("t.jsonl")
    lines(Path("t.jsonl"), [{**ROWS[0], "session_id": {}, "x": "y"}, {**ROWS[1], "input_length": "20"}])
    assert len(load("t.jsonl")) == 2


def test_a_trace_whose_name_is_no_text_is_replayed() -> None:
    path = os.fsdecode(b"t\xff.jsonl")
    lines(Path(path), ROWS)
    code, err = dsim("replay", path, "--policy", "ar", "-o", os.fsdecode(b"out\xff"))
    assert code == 0, err
    assert read_run(os.fsdecode(b"out\xff")).info["trace"]["name"] == "t\\xff"


CONFIG = {"base": {"trace": "t.jsonl", "policy": "ar"}, "grid": {"rate": [1, 2]}}


def test_an_empty_sweep_json_hides_no_finished_cell() -> None:
    sweep(CONFIG, "out", jobs=1)
    Path("out/sweep.json").write_text("")
    assert sweep(CONFIG, "out", jobs=1).num_reused == 2


def test_a_link_in_a_sweeps_folder_is_not_followed() -> None:
    sweep(CONFIG, "out", jobs=1)
    cells = Path("out/cells.jsonl").rename("theirs.jsonl").read_bytes()
    Path("out/cells.jsonl").symlink_to("../theirs.jsonl")
    for force in (False, True):
        with pytest.raises(DsimError, match=r"out: holds cells.jsonl, which is not of a sweep"):
            sweep(CONFIG, "out", jobs=1, force=force)
    assert Path("theirs.jsonl").read_bytes() == cells


@pytest.mark.parametrize(
    "entry",
    [
        [], {}, {"key": 1}, {"key": "k", "cell": []}, {"key": "k", "cell": {}, "summary": []},
        {"key": "k", "cell": {}, "error": 1}, {"key": "k", "cell": {}, "summary": {"goodput": "much"}},
        {"key": "k", "cell": {}, "summary": {"slos": [1]}}, {"key": "k", "cell": {}, "summary": {"a": {"b": [1]}}},
        {"key": "k", "cell": {}, "summary": {"a": 2**70}},
    ],
)  # fmt: skip
def test_a_line_of_cells_in_another_shape_is_named(entry: object) -> None:
    sweep(CONFIG, "out", jobs=1)
    Path("out/cells.jsonl").write_text(json.dumps(entry) + "\n")
    with pytest.raises(DsimError, match=r"cells.jsonl:1: cannot be read as a finished cell") as error:
        sweep(CONFIG, "out", jobs=1)
    assert "\n" not in str(error.value)


def test_a_page_that_cannot_be_drawn_costs_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError("no pencil")

    monkeypatch.setattr("dsim.report.run_page.write_html", breaks)
    with pytest.raises(RuntimeError, match="no pencil"), RunWriter("run") as writer:
        writer.finish({"policies": []})
    assert sorted(os.listdir("run")) == ["requests.parquet", "run.json", "steps.parquet"]
    assert read_run("run").policies == []


def test_a_full_disk_in_the_middle_of_a_run_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter.write_batch", full)
    with pytest.raises(MachineError, match="run: cannot be written: No space left on device"):
        record([Scenario("t.jsonl")], load("t.jsonl"), in_twin, out=Path("run"))
    assert os.listdir(".") == ["t.jsonl"]


def test_no_warning_of_numpys_reaches_the_user() -> None:
    lines(Path("t.jsonl"), [{**ROWS[0], "timestamp": t} for t in (0, 0, 0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code, err = dsim("replay", "t.jsonl", "--policy", "ar")
    assert (code, err) == (0, "")
    trace = synth("poisson", 1.0, num_requests=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(trace, time_scale=1e-9)


@pytest.mark.parametrize("command", [("profiles",), ("policies", "--json")])
def test_a_full_standard_output_is_told_in_a_line(command: tuple[str, ...]) -> None:
    disasters.closed_output(command, Path.cwd())


def test_numbers_beyond_all_floats_are_one_line() -> None:
    huge = "1" + "0" * 400
    turns = (
        f'[{{"input_toks": 9, "output_toks": 4, "tool_duration_ns": {huge}}}, {{"input_toks": 9, "output_toks": 4}}]'
    )
    Path("t.jsonl").write_text(f'{{"arrival_time_ns": 0, "session_id": "a", "sub_requests": {turns}}}\n')
    with pytest.raises(TraceError, match=r"t.jsonl:1: delay is 1000.*, expected a finite number"):
        load("t.jsonl")
    Path("s.toml").write_text(f'[base]\ntrace = "t.jsonl"\nrate = {huge}\n[grid]\nseed = [1, 2]\n')
    with pytest.raises(DsimError, match=r"s.toml: base.rate is 1000.*, expected a number"):
        sweep("s.toml", jobs=1)


@pytest.mark.parametrize("option", ["trace", "--profile", "--policy", "--lengths", "sweep"])
def test_a_name_that_no_file_can_have_is_no_file(option: str) -> None:
    name = "x" * 5000
    Path("s.toml").write_text(f'[base]\ntrace = "{name}"\n[grid]\nrate = [1]\n')
    command = {"trace": ("replay", name), "sweep": ("sweep", "s.toml", "-o", "out")}
    code, err = dsim(*command.get(option, ("replay", "t.jsonl", option, name)))
    assert (code, err.count("\n")) == (2, 1), err
    assert len(err) < 1200
