"""What the attack and those before it found, one by one: each lost something, hung, or ended in a traceback."""

import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dsim.comparison.clients.client_file import read_client
from dsim.comparison.deviation import errors, relative_error
from dsim.engine.errors import ModelError
from dsim.live.weights import config_of
from dsim.planner.quality import load_table
from dsim.planner.record import in_twin, record
from dsim.planner.sweep import sweep
from dsim.profiler.profile import SHIPPED
from dsim.research.attack import disasters, planning
from dsim.research.attack.commands import run_command
from dsim.results.run import read_run
from dsim.results.run_folder import RunWriter
from dsim.results.run_info import RunInfo, TraceInfo
from dsim.results.world import World
from dsim.serve.words import Tokenized
from dsim.traces import load, prepare, synth

from .checks import cases, refused
from .traces.files import save

ROWS = [{"timestamp": 1000 * i, "input_length": 20, "output_length": 8} for i in range(5)]


@pytest.fixture(autouse=True)
def _trace() -> None:
    save(ROWS, "t.jsonl")


def dsim(*arguments: str) -> tuple[int, str]:
    """The exit code and the standard error of a command."""
    code, _, err = run_command(list(arguments), Path.cwd())
    return code, err


def test_a_search_with_a_mistaken_option_deletes_no_folder() -> None:
    Path("p").mkdir()
    Path("p/tune.json").write_text('{"objectives": {}, "winner": {}, "num_trials": 3}')
    for more in (("--trials", "0"), ("--objective", "speed"), ("--ray", "moon")):
        code, _ = dsim("tune", "t.jsonl", "--slo", "ttft=1s", "-o", "p", "--force", *more)
        assert (code, os.listdir("p")) == (2, ["tune.json"])
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("years")
    code, err = dsim("tune", "t.jsonl", "--slo", "ttft=1s", "-o", "mine", "--force")
    assert (code, err) == (2, "Error: mine: holds thesis.tex, which is not of a search: choose another folder\n")
    assert Path("mine/thesis.tex").read_text() == "years"


def test_a_session_may_be_named_by_anything() -> None:
    save([{**ROWS[0], "session_id": {}, "x": "y"}, {**ROWS[1], "input_length": "20"}], "t.jsonl")
    assert len(load("t.jsonl")) == 2


def test_a_trace_whose_name_is_no_text_is_replayed() -> None:
    path = os.fsdecode(b"t\xff.jsonl")
    save(ROWS, path)
    code, err = dsim("replay", path, "--policy", "ar", "-o", os.fsdecode(b"out\xff"))
    assert code == 0, err
    assert read_run(os.fsdecode(b"out\xff")).info.trace.name == "t\\xff"


CONFIG = {"base": {"trace": "t.jsonl", "policy": "ar"}, "grid": {"rate": [1, 2]}}


def test_an_empty_sweep_json_hides_no_finished_cell() -> None:
    sweep(CONFIG, "out", jobs=1)
    Path("out/sweep.json").write_text("")
    assert sweep(CONFIG, "out", jobs=1).num_reused == 2


def test_a_link_in_a_sweeps_folder_is_not_followed() -> None:
    sweep(CONFIG, "out", jobs=1)
    cells = Path("out/replays.db").rename("theirs.db").read_bytes()
    Path("out/replays.db").symlink_to("../theirs.db")
    for force in (False, True):
        with refused(r"out: holds replays.db, which is not of a sweep"):
            sweep(CONFIG, "out", jobs=1, force=force)
    assert Path("theirs.db").read_bytes() == cells


def test_a_page_that_cannot_be_drawn_costs_no_run() -> None:
    def breaks(_: object) -> str:
        raise RuntimeError("no pencil")

    with pytest.raises(RuntimeError, match="no pencil"), RunWriter("run") as writer:
        writer.finish(RunInfo(trace=TraceInfo("none")), breaks)
    assert sorted(os.listdir("run")) == ["requests.parquet", "run.json", "steps.parquet"]
    assert read_run("run").policies == []


def test_no_warning_of_numpys_reaches_the_user() -> None:
    save([{**ROWS[0], "timestamp": t} for t in (0, 0, 0)], "t.jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code, err = dsim("replay", "t.jsonl", "--policy", "ar")
    assert (code, err) == (0, "")
    trace = synth("poisson", 1.0, num_requests=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(trace, rate=1e9)


CLIENTS = Path(__file__).parent / "comparison" / "clients"
HUGE, LONG = "1" + "0" * 400, "x" * 5000
HEADER = json.loads(disasters.EXAMPLE.read_text().splitlines()[0])
BENCH = json.loads((CLIENTS / "vllm_bench.json").read_text())
SWEEP = '[base]\ntrace = "t.jsonl"\n{}\n[grid]\nseed = [1, 2]\n'
BROKEN = "experiment,series,at,measure,published,threshold,yield\na,\rb\n"
# A file and what lies in it (a text, JSON, or rows of it), the words of a command, and its one line.
REFUSED: tuple[tuple[str, Any, str, str], ...] = (
    ("x", "", "trace convert t.jsonl /dev/full --force", "/dev/full: is a device, expected the name of a"),
    ("x", "", "profile --from-log t.jsonl -o /", "/: is a directory, expected the name of a file to write"),
    ("x", "", "replay t.jsonl --replicas 20000", "replicas is 20000, expected at most 4096"),
    ("x", "", f"replay t.jsonl --replicas {HUGE}", "replicas"),
    ("x", "", "replay t.jsonl --arrival poisson --num-requests 100000000", "100000000"),
    *(("t.jsonl", [*ROWS, {**ROWS[0], "timestamp": at}], "trace convert t.jsonl out.jsonl --time-unit s",
       r"arrivals must start at 0, never decrease and end by 1e\+12 s")
      for at in (1e17, 1e14)),
    ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,9,4\n,9,4\n", "trace info t.csv",
     "t.csv:3: TIMESTAMP is .*, expected a date and time"),
    ("s.toml", SWEEP.replace("t.jsonl", LONG).format(""), "sweep s.toml --jobs 1 -o out", ""),
    ("s.toml", SWEEP.format(f"rate = {HUGE}"), "sweep s.toml --jobs 1 -o out", "s.toml: base.rate is 1000.*, expected"),
    ("s.toml", SWEEP.format('slos = ["ttft=soon"]'), "sweep s.toml --jobs 1 -o out",
     "s.toml: base.slos: SLO 'ttft=soon': bound is 'soon', expected a time above zero"),
    ("s.toml", SWEEP.replace("[1, 2]", str([*range(999)])).format("") + f"rate = {[*range(1, 999)]}\n",
     "sweep s.toml --jobs 1 -o out", "asks for 997002 cells, expected at most 100000"),
    ("p.json", {k: v for k, v in json.loads((SHIPPED / "a100-sdar-8b.json").read_text()).items() if k != "model"},
     "replay t.jsonl --profile p.json", "p.json: model is missing, expected keys"),
    *(("b.json", BENCH | {key: value}, "import b.json", rf"b.json: request 0: {says}, expected a(t most|.* number)")
      for key, value, says in (("itls", [[10**400]] * 8, r"itls\[0\] is 1000.*"),
                               ("latencies", [1e308] * 8, r"latencies is 1e\+308"),
                               ("ttfts", ["x" * 9000] * 8, 'ttfts is "xxx.*'))),
    ("l.jsonl", [HEADER, {"kind": "request", "request": 0, "input_length": 9, "output_length": 2**63 - 1}],
     "profile --from-log l.jsonl -o p.json", "l.jsonl:2: output_length is .*, expected 0 to 1000000000000"),
    ("l.jsonl", "\n".join(disasters.EXAMPLE.read_text().splitlines()[:123]), "profile --from-log l.jsonl -o p.json",
     "^Error: l.jsonl: "),
    *(("l.jsonl", [HEADER | {"model": name}], "profile --from-log l.jsonl -o p.json", "^Error: l.jsonl:1: ")
      for name in ("9" * 5000, "9" * 5000 + ".json", "a\0b")),
    *(("y.csv", f"threshold,yield,block_length\n0.9,3.2,{length}\n", "replay t.jsonl --yield y.csv",
       f"y.csv:2: block_length is {length}, expected a whole number up to 256") for length in ("1000000", "32.5")),
    ("p.csv", BROKEN, "replay t.jsonl --yield p.csv", "p.csv: cannot be read as CSV: new-line"),
    ("gpu.toml", planning.SHEET.replace("= 500", "= " + "9" * 400),
     "profile --roofline gpu.toml --model SDAR-8B -o p.json", "^Error: gpu.toml: bf16_tflops is 999"),
    *(("x", "", f"replay t.jsonl --columns {columns}", "--columns")
      for columns in (LONG, f"arrival={LONG}", f"arrival={LONG},input=input_length,output=output_length")),
    *(("x", "", command, "") for name in ("pipe", "/dev/zero", LONG) for command in (
        f"replay {name}", f"replay t.jsonl --profile {name}", f"replay t.jsonl --policy {name}",
        f"replay t.jsonl --lengths {name}", f"import {name}")),
    *(("x", "", f"{command} {name}", "") for name in ("pipe", "/dev/zero") for command in (
        "sweep -o out", "tune t.jsonl --space", "tune t.jsonl --quality-table")),
)  # fmt: skip


@cases("name held words says", *REFUSED)
def test_an_input_of_another_shape_is_told_in_a_line(name: str, held: Any, words: str, says: str) -> None:
    if isinstance(held, list):
        save(held, name)
    elif name != "x":
        Path(name).write_text(held if isinstance(held, str) else json.dumps(held))
    os.mkfifo("pipe")
    before = sorted(os.listdir())
    code, err = dsim(*words.split())
    assert (code, err.count("\n"), re.findall(r"(?:(.)\1{99})", err)) == (2, 1, []), err
    assert re.search(says, err), err
    assert sorted(os.listdir()) == before
    assert Path("/dev/full").is_char_device()


def test_beside_a_score_of_nought_nothing_is_a_share() -> None:
    Path("q.csv").write_text("policy,threshold,score,baseline\noptimus,0.8,50,0\n")
    with refused("baseline is '0', expected a number above zero"):
        load_table("q.csv")


CONFIG_JSON = {
    "architectures": ["SDARForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
    "intermediate_size": 8, "vocab_size": 300, "max_position_embeddings": 64, "block_size": 4, "mask_token_id": 299,
}  # fmt: skip


@cases(
    "changed says",
    ({"rope_scaling": [1]}, "rope_scaling is a list of 1, expected an object"),
    ({"architectures": [["SDARForCausalLM"]]}, "architecture is .*, expected one of"),
    ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648, expected 1 to 1024"),
    ({"intermediate_size": 2**62}, "intermediate_size is 4611686018427387904, expected 1 to 1048576"),
    ({"hidden_size": "9" * 5000}, r'hidden_size is "999.*\.\.\., expected a whole number'),
    ({"rms_norm_eps": 10**400}, r"rms_norm_eps is 1000.*\.\.\., expected a finite number"),
)
def test_a_config_of_another_shape_is_one_line(changed: dict[str, object], says: str) -> None:
    Path("config.json").write_text(json.dumps(CONFIG_JSON | changed))
    with refused(f"config.json: {says}", ModelError) as error:
        config_of(str(Path.cwd()))
    assert len(str(error.value)) < 500


@cases("redirect", ">&-", ">&- 2>&-")
def test_a_closed_output_ends_no_command(redirect: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m dsim profiles {redirect}"], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_column_of_spans_of_time_is_written_as_text() -> None:
    spans = [timedelta(seconds=1), timedelta(seconds=2)]
    columns = {"timestamp": [0, 1], "input_length": [9, 9], "output_length": [4, 4], "session_id": spans}
    pq.write_table(pa.table(columns), "t.parquet")
    code, err = dsim("trace", "convert", "t.parquet", "out.jsonl")
    assert (code, err) == (0, "")
    assert json.loads(Path("out.jsonl").read_text().splitlines()[1])["session_id"] == "0:00:02"


def test_a_clients_odd_times_are_left_out() -> None:
    held = json.loads((CLIENTS / "guidellm.json").read_text())
    requests = held["benchmarks"][0]["requests"]
    requests["successful"][0]["info"]["settings"] = {"relative_timestamp": 10**400}
    failed = {"info": {"settings": {}, "timings": {"request_start": 1.0}}, "prompt_tokens": 10**400}
    requests["errored"] = [failed]
    Path("g.json").write_text(json.dumps(held))
    log = read_client("g.json")
    assert [r.input_length for r in log.requests if r.error] == [0]


def test_half_a_character_of_a_client_is_no_server_s_error() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?")).save("tokenizer.json")
    assert Tokenized("tokenizer.json").encode("\ud800") == [0]


def test_requests_a_hair_apart_come_at_no_rate() -> None:
    held = json.loads((CLIENTS / "vllm_bench.json").read_text())
    Path("b.json").write_text(json.dumps(held | {"start_times": [5e-324] + [0.0] * (len(held["ttfts"]) - 1)}))
    assert dsim("import", "b.json", "--json")[0] == 0
    save([row | {"timestamp": 5e-324 * i} for i, row in enumerate(ROWS)], "s.jsonl")
    code, out, _ = run_command(["trace", "info", "s.jsonl", "--time-unit", "s", "--json"], Path.cwd())
    assert (code, json.loads(out)["rate"]) == (0, None)
    assert dsim("replay", "s.jsonl", "--time-unit", "s", "--policy", "ar", "-o", "out")[0] == 0


def with_column(steps: pa.Table, name: str, value: float | None) -> pa.Table:
    """Steps with another column: this value in every row."""
    at = steps.column_names.index(name)
    return steps.set_column(at, name, pa.array([value] * len(steps), steps.schema.field(name).type))


@cases(
    "damage says",
    (lambda rows: rows.drop_columns(["window", "commits"]), "lacks the columns commits, window$"),
    (lambda rows: with_column(rows, "batch", None), r"cannot be read .*: it lacks \d+ values of a column of whole"),
    (lambda rows: with_column(rows, "latency", math.inf), "cannot be read.*it holds inf"),
    (None, "^Error: a/run.json: fitted_profile"),
)
def test_a_run_of_another_shape_is_told_in_a_line(damage: Callable[[pa.Table], pa.Table] | None, says: str) -> None:
    record([World("t.jsonl", policy="ar")], load("t.jsonl"), in_twin, out=Path("a"))
    if damage is None:
        held = json.loads(Path("a/run.json").read_text())
        Path("a/run.json").write_text(json.dumps(held | {"fitted_profile": []}))
    else:
        pq.write_table(damage(pq.read_table("a/steps.parquet")), "a/steps.parquet")
        says = f"^Error: a/steps.parquet: {says}"
    code, err = dsim("compare", "a", "a")
    assert (code, err.count("\n")) == (2, 1), err
    assert re.search(says, err), err


def test_a_share_of_next_to_nothing_is_no_error() -> None:
    found = errors(np.array([2.0, 3.0]), np.array([1e-320, 2.0]))
    assert (found.num, found.mape, found.num_zero) == (1, 0.5, 1)
    assert relative_error(2.0, 1e-320) is None
