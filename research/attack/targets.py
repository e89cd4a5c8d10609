"""What is attacked: every loader and the option parser, each with valid inputs to start from and a way to run it."""

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import dsim
from dsim.cli.python import import_run
from dsim.comparison.bounds import Bound
from dsim.comparison.clients.client_file import read_client
from dsim.comparison.clients.measured import MeasuredRun, measured_run, write_measured
from dsim.comparison.comparison import compare_runs
from dsim.engine.errors import DsimError
from dsim.engine.spec import PRESETS, parse
from dsim.files.duration import seconds_of
from dsim.files.metrics_text import read_samples
from dsim.planner import grid, quality, space, validation
from dsim.planner.record import in_twin, record
from dsim.planner.validation import Cell
from dsim.profiler import profile, steplog
from dsim.results.run import Run, read_run
from dsim.results.slo import Slo
from dsim.results.world import World, replicas_of
from dsim.traces import describe, load, prepare, write
from dsim.traces.lengths import parse_lengths
from dsim.traces.prefixes import prefixes_of
from dsim.traces.trace import Trace

from . import agreeing, commands, failing, hostile_clients, mutate, planning, worlds

ROOT = Path(dsim.__file__).parent


@dataclass(frozen=True)
class Target:
    """Something that reads what others wrote. `attack` makes one input below a folder and reads it."""

    name: str
    attack: Callable[[Random, Path], None]
    weight: int = 1  # how often beside the others; those that take tens of milliseconds are of 1; 0: by name alone
    of_a_file: bool = True  # a refusal names the file


def targets(work: Path) -> list[Target]:
    """Every target; `work` is where what they start from is made, once."""
    rows = [{"timestamp": 1000 * i, "input_length": 20 + i, "output_length": 8} for i in range(6)]
    (work / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _make_run(work)
    found = [Target(f"trace {name}", partial(_trace, make), 4) for name, make in TRACES.items()]
    found += [
        Target("trace parquet", _parquet_trace, 4),
        Target("profile", _profile, 4),
        Target("step log", _steplog, 4),
        Target("policy file", _policy_file, 4),
        Target("policy", _policy, 4, of_a_file=False),
        Target("sweep file", partial(_grid, work), 4),
        Target("space file", _space, 4),
        Target("quality table", _quality, 4),
        Target("run.json", partial(_run_file, work, RUN[:1])),
        Target("run's Parquet", partial(_run_file, work, RUN[1:])),
        Target("validation.json", _plan, 4),
        Target("load generator", _client, 4),
        Target("Prometheus", _prometheus, 4),
        Target("SLO, bound, duration, lengths", _words, 4, of_a_file=False),
        *(Target(name, attack, weight) for name, (attack, weight) in planning.of_files().items()),
        *(Target(name, attack, of_a_file=False) for name, attack in planning.of_clients(work).items()),
        Target("hostile clients", partial(hostile_clients.hostile, work), 0, of_a_file=False),
        Target("command line", partial(commands.command_line, work), of_a_file=False),
        Target(
            "command's files", partial(commands.with_files, work, _files(work), partial(_a_run, work)), of_a_file=False
        ),
        *(Target(name, attack, 0, of_a_file=False) for name, attack in agreeing.of_paths().items()),
        *(Target(name, attack, 0, of_a_file=False) for name, attack in failing.of_failures().items()),
    ]
    return [*found, *_models(work), Target("worlds", worlds.attack, of_a_file=False)]


def _models(work: Path) -> list[Target]:
    """A model's directory; none where PyTorch is not installed."""
    if find_spec("torch") is None:
        return []
    from . import model_folders

    found = [Target(name, attack, weight) for name, (attack, weight) in model_folders.ALL.items()]
    return [*found, Target("safetensors", partial(model_folders.weights, work))]


# ---- traces ---------------------------------------------------------------------------------------------------

MOONCAKE = [
    {"timestamp": 30 * i, "input_length": 600 + i, "output_length": 20, "hash_ids": [1, 2], "session_id": i % 2,
     "slo_class": "chat", "max_tokens": 20 + i, "id": f"r{i}"}
    for i in range(5)
]  # fmt: skip
GUIDE = [{"timestamp": 0.5 * i, "input_length": 9, "output_length": 3, "gen_length": 8} for i in range(4)]
AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
BURST = ["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"]

SPENT = [
    {
        "request_id": f"r{i}",
        "prompt_tokens": 20,
        "completion_tokens": 10,
        "startTime": f"2026-03-01T10:00:0{i}.000Z",
        "endTime": "2026-03-01T10:00:09Z",
        "completionStartTime": f"2026-03-01T10:00:0{i + 1}.500Z",
        "model": "m",
        "status": "success",
        "call_type": "acompletion",
        "cache_hit": "False",
        "metadata": {"user_api_key": "88dc"},
    }
    for i in range(4)
]
RESPONSES = [
    {"id": f"r{i}", "object": "chat.completion", "created": 1772359200 + i, "model": "m",
     "usage": {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}} for i in range(4)
]  # fmt: skip
OWN = ["created_at", "prompt_tokens", "completion_tokens", "tenant"]
TRACES: dict[str, Callable[[Random], bytes]] = {
    "mooncake": lambda c: mutate.json_lines(MOONCAKE, c),
    "guidellm": lambda c: mutate.json_lines(GUIDE, c),
    "json": lambda c: mutate.json_text(MOONCAKE, c),
    "azure": lambda c: mutate.table(AZURE, [[f"2023-11-16 18:15:4{i}.68", "374", "44"] for i in range(5)], c),
    "burstgpt": lambda c: mutate.table(BURST, [[str(5 * i), "ChatGPT", "47", "18", "65", "x"] for i in range(5)], c),
    "litellm": lambda c: mutate.json_text(SPENT, c),
    "responses": lambda c: mutate.json_lines(RESPONSES, c),
    "own columns": lambda c: mutate.table(OWN, [[f"2026-03-01T10:00:0{i}Z", "9", "4", "a"] for i in range(5)], c),
    "engine's log": lambda c: _changed_log(c, _logs()[1]),
}
COLUMNS = "arrival=created_at,input=prompt_tokens,output=completion_tokens,slo_class=tenant"


def _trace(make: Callable[[Random], bytes], chance: Random, folder: Path) -> None:
    path = _write(folder / "trace", make(chance))
    columns = None
    if make is TRACES["own columns"]:
        columns = COLUMNS if chance.random() < 0.7 else mutate.spec(COLUMNS, chance)
    try:
        _use_trace(path, chance, columns)
    except DsimError as error:
        if "--columns" not in str(error):
            raise
        raise DsimError(f"{path}: {error}") from None


def _parquet_file(chance: Random) -> bytes:
    if chance.random() < 0.3:
        odd = pa.array([chance.choice((None, "x", "9")) for _ in MOONCAKE])
        columns = pa.table({
            name: chance.choice((odd, mutate.of_a_type(len(MOONCAKE), chance))) if chance.random() < 0.3
            else [r[name] for r in MOONCAKE] for name in MOONCAKE[0]
        })  # fmt: skip
    else:
        columns = pa.Table.from_pylist(json.loads(mutate.nearly(json.dumps(MOONCAKE), chance)))
    data = _parquet(columns)
    return data if chance.random() < 0.5 else mutate.damaged(data, chance)


def _parquet_trace(chance: Random, folder: Path) -> None:
    _use_trace(_write(folder / "trace", _parquet_file(chance)), chance)


def _parquet(columns: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(columns, sink)
    return sink.getvalue()


def _use_trace(path: Path, chance: Random, columns: str | None = None) -> None:
    """Read it, prepare it, write it, and read that again."""
    only = chance.choice((None, None, None, "model=m", "status=success", "x=y"))
    with contextlib.suppress(DsimError):  # as a client's measured run
        import_run(path, columns=columns, only=only, skip_bad=chance.random() < 0.5)
    trace = load(
        path, skip_bad=chance.random() < 0.5, only=only,
        time_unit=chance.choice((None, None, None, "s", "ns")),
        columns=columns,
    )  # fmt: skip
    describe(trace)
    with contextlib.suppress(DsimError):  # hash ids that do not fit their prompts, as the trace's name says
        prefixes_of(trace)
    copy = write(trace, path.with_suffix(".out"), force=True)
    World(str(copy), slos=("ttft=1s",)).requests()
    with contextlib.suppress(DsimError):
        again = load(copy)
        assert len(again) == len(trace)
        assert abs(again.duration - trace.duration) <= 2e-3 + 1e-9 * trace.duration
    with contextlib.suppress(DsimError):
        _prepare_trace(trace, chance)


def _prepare_trace(trace: Trace, chance: Random) -> None:
    prepare(
        trace,
        rate=chance.choice((None, None, None, 5.0, 1e-300)),
    )  # fmt: skip


# ---- profiles, logs and policies ------------------------------------------------------------------------------


@cache
def _profiles() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((ROOT / "profiler" / "profiles").glob("*.json"))]


def _profile(chance: Random, folder: Path) -> None:
    path = _write(folder / "p.json", mutate.json_text(chance.choice(_profiles()), chance))
    read = profile.load(path)
    profile.save(read, folder / "again.json", force=True)
    assert profile.load(folder / "again.json") == read


# A step of two requests.
ROWS_OF_A_STEP = {
    "kind": "step", "step": 0, "latency": 0.05, "device": 0.04, "batch": 2, "tokens": 39, "sum_kv": 59, "start": 1.0,
    "requests": [0, 1], "phases": ["prefill", "denoise"], "row_tokens": [7, 32], "row_keys": [27, 32],
    "emitted": [0, 3], "graph": True, "waiting": 1, "running": 2, "pages": 3,
}  # fmt: skip


@cache
def _logs() -> list[list[Any]]:
    """Logs of a few requests and steps; the last can be fitted to."""
    lines = [json.loads(line) for line in (ROOT / "examples" / "steplog.jsonl").read_text().splitlines()]
    header, *asked = [line for line in lines if line.get("kind", "request") == "request"]
    steps = [line for line in lines[1:] if line["kind"] != "request"][:600]
    came = [{"kind": "request", "request": i, "id": f"r{i}", "input_length": 20 + i, "output_length": 9,
             "received": 0.5, "arrival": 0.75} for i in range(2)]  # fmt: skip
    later = ROWS_OF_A_STEP | {"step": 1, "start": 1.0625, "phases": ["decode", "flush"], "emitted": [1, 2]}
    over = {"kind": "finish", "request": 1, "time": 1.125}
    hooked = {"preset": "vllm-ar", "started": 1.7e9, "settings": {"max_num_seqs": 4, "x": "y"}}
    second = [header | hooked, *came, ROWS_OF_A_STEP, later, over]
    return [[header, *asked[:5], *steps[:8]], second, [header, *asked, *steps]]


def _changed_log(chance: Random, log: list[Any]) -> bytes:
    header, *lines = log
    rest = mutate.json_lines(lines, chance)
    if chance.random() < 0.1:
        return mutate.json_text(header, chance) + b"\n" + rest
    first = json.dumps(header) if chance.random() < 0.7 else mutate.nearly(json.dumps(header), chance)
    return first.encode() + b"\n" + rest


def _steplog(chance: Random, folder: Path) -> None:
    whole = chance.randrange(300) == 217  # a fit takes a second: never what a shrinking search likes
    path = _write(folder / "log.jsonl", _changed_log(chance, _logs()[2] if whole else chance.choice(_logs()[:2])))
    log = steplog.read_log(path)
    if whole:
        found = steplog.profile_of_log(log, "p", str(path))
        profile.save(found, folder / "p.json", force=True)
        assert profile.load(folder / "p.json") == found


POLICY_FILE = """policy = "optimus"
max_chunk = 8
num_blocks = 2
max_batch = "none"
threshold = 0.9
replicas = 3
"""
SWEEP_FILE = """title = "t"
[base]
trace = "THE TRACE"
slos = ["ttft=1s"]
[grid]
rate = [1, 2]
policy.max_batch = [4, 8]
"""
SPACE_FILE = """policy = ["optimus", "chunk"]
chunk = [4, 16]
max_batch = ["none", 32]
[optimus]
"""
SCORES = [["optimus", "0.9", "99.5", "100"], ["lmdeploy-bd32", "0.9", "100", "100"]]


def _policy_file(chance: Random, folder: Path) -> None:
    path = _write(folder / "p.toml", mutate.toml_text(POLICY_FILE, chance))
    replicas_of([str(path)], None)
    parse(str(path))


def _policy(chance: Random, folder: Path) -> None:
    given = chance.choice(
        (*PRESETS, "optimus:8,num_blocks=2", "lmdeploy-bd32,max_batch=4,threshold=0.8", "maskkv:32,logits=block",
         "optimus:16,num_blocks=2", "focus:1.2")
    )  # fmt: skip
    parse(mutate.spec(given, chance))


def _grid(work: Path, chance: Random, folder: Path) -> None:
    given = mutate.toml_text(SWEEP_FILE, chance).replace(b"THE TRACE", os.fsencode(work / "trace.jsonl"))
    grid.read_plan(_write(folder / "s.toml", given))


def _space(chance: Random, folder: Path) -> None:
    space.space_of(World("azure-conv"), _write(folder / "s.toml", mutate.toml_text(SPACE_FILE, chance)))


def _quality(chance: Random, folder: Path) -> None:
    given = mutate.table(["policy", "threshold", "score", "baseline"], SCORES, chance)
    table = quality.load_table(_write(folder / "q.csv", given))
    quality.quality_of(parse("optimus"), "SDAR-8B", table)


# ---- what dsim wrote itself -----------------------------------------------------------------------------------


def _make_run(work: Path) -> None:
    world = World(str(work / "trace.jsonl"), policy="chunk:8", slos=("ttft=1s",))
    record([world, replace(world, policy="ar")], world.requests(), in_twin, out=work / "run")
    write_measured(_measured(), work / "measured")


RUN = ("run.json", "requests.parquet", "steps.parquet")


def _run_with(run: Path, folder: Path, name: str, data: bytes) -> Path:
    """A run's folder of which one file is another."""
    copy = folder / "run"
    copy.mkdir(exist_ok=True)
    for file in RUN:
        if file == name:
            _write(copy / file, data)
        else:
            os.link(run / file, copy / file)
    return copy


def _a_run(work: Path, chance: Random, folder: Path) -> Path:
    """The folder of a replay, or of a load generator's file, of which a file is changed."""
    run = work / chance.choice(("run", "measured"))
    return _run_with(run, folder, *_changed_file(run, chance.choice(RUN), chance))


def _changed_file(run: Path, name: str, chance: Random) -> tuple[str, bytes]:
    data = _held(run / name)
    if name == "run.json":
        more = _more_of_a_run() if chance.random() < 0.5 else {}
        return name, mutate.json_text(json.loads(data) | more, chance)
    if mutate.GENTLE < 1 and chance.random() < 0.5:
        return name, mutate.damaged(data, chance)
    return name, _parquet(mutate.columns(pq.read_table(io.BytesIO(data)), chance))


@cache
def _more_of_a_run() -> dict[str, Any]:
    """What a run.json may say besides, as other commands write it."""
    return {
        "as_logged": {"log": "l.jsonl", "profile": "fitted to the same log"},
        "fitted_profile": _profiles()[0], "cost": {"gpus": 2, "per_hour": 4.0, "currency": "USD"},
        "live": {"device": "cpu", "model": "m", "settings": {"temperature": 0.5}},
    }  # fmt: skip


def _run_file(work: Path, names: tuple[str, ...], chance: Random, folder: Path) -> None:
    """One of these files of a run is changed."""
    _use_run(work, _run_with(work / "run", folder, *_changed_file(work / "run", chance.choice(names), chance)), chance)


def _use_run(work: Path, folder: Path, chance: Random) -> None:
    """Read what a page or a comparison reads of it; the slower ones less often."""
    run = read_run(folder)
    how = chance.random()
    if how < 0.1:
        compare_runs([(_whole_run(work), run)], _profile_of)
    else:
        for name in run.policies:
            run.requests(name)
            run.steps(name)
            run.step_lists(name)


@cache
def _whole_run(work: Path) -> Run:
    return read_run(work / "run")


@cache
def _profile_of(_name: str) -> profile.Profile:
    return profile.load(profile.DEFAULT)


CONFIG = {"grid": {"rate": [1.0, 2.0]}}


def _sweep_config(work: Path) -> dict[str, Any]:
    return CONFIG | {"base": {"trace": str(work / "trace.jsonl"), "policy": "ar"}}


def _plan(chance: Random, folder: Path) -> None:
    cell = Cell(policy="ar", load="64", concurrency=64, rate=1.0, num_requests=9, again=True)
    plan = {
        "trace": "t", "lengths": None, "profile": "p", "seed": 1, "commits": "twin", "policies": "ar",
        "capacities": {"ar": 2.0}, "cells": [asdict(cell)],
    }  # fmt: skip
    _write(folder / "validation.json", mutate.json_text(plan, chance))
    held = validation._plan(folder)
    assert held is not None
    held.get("capacities", dict[str, float])
    held.get("cells", list[Cell])


# ---- what load generators and servers wrote ---------------------------------------------------------------------

CLIENTS = commands.CLIENTS
SAMPLES = """# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_sum{model_name="m"} 1.5
vllm:time_to_first_token_seconds_count{model_name="m"} 8
vllm:request_success_total{finished_reason="stop"} 8
vllm:prompt_tokens_total{model_name="m"} 600
vllm:generation_tokens_total{model_name="m"} 300
"""


def _client_file(chance: Random) -> bytes:
    """What a load generator wrote, changed."""
    name = chance.choice(("vllm_bench.json", "guidellm.json", "aiperf.jsonl"))
    held = _held(CLIENTS / name).splitlines() if name.endswith("l") else [_held(CLIENTS / name)]
    rows = [json.loads(line) for line in held if line.strip()]
    return mutate.json_lines(rows, chance) if len(rows) > 1 else mutate.json_text(rows[0], chance)


def _client(chance: Random, folder: Path) -> None:
    log = read_client(_write(folder / "bench.json", _client_file(chance)))
    measured_run(log, None, slos=[Slo.parse("ttft=1s")], replicas=chance.choice((1, 2)))


def _metrics_file(chance: Random) -> bytes:
    """A server's metrics, changed."""
    lines = SAMPLES.splitlines()
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(lines))
        value = chance.choice(("NaN", "1e308", "-1", "0", mutate.nearly(lines[at], chance).rpartition(" ")[2]))
        other = f"{lines[at].rpartition(' ')[0]} {value}"
        lines[at] = chance.choice((other, other, mutate.spec(lines[at], chance), chance.choice(mutate.WORDS)))
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return mutate.damaged(data, chance) if chance.random() < 0.3 else data


def _prometheus(chance: Random, folder: Path) -> None:
    read_samples(_write(folder / "metrics.txt", _metrics_file(chance)))


@cache
def _measured() -> MeasuredRun:
    return measured_run(read_client(CLIENTS / "vllm_bench.json"))


# ---- the option parser's words --------------------------------------------------------------------------------


def _words(chance: Random, folder: Path) -> None:
    read, given = chance.choice(
        [
            (Slo.parse, "chat/p90:ttft=2s"), (Slo.parse, "95%:tpot_chunk=50ms"), (Bound.parse, "mean:e2el=15%"),
            (partial(seconds_of, "--budget"), "1.5h"), (parse_lengths, "lognormal:96,48,64,32"),
            (parse_lengths, "fixed:64,64"),
        ]
    )  # fmt: skip
    read(mutate.spec(given, chance))


# ---- whole commands -------------------------------------------------------------------------------------------


def _files(work: Path) -> dict[str, Callable[[Random], bytes]]:
    """By kind: a changed file for a command to read."""
    many = [
        {"timestamp": 700 * i * i, "input_length": 20 + i, "output_length": 8, "slo_class": "chat"} for i in range(40)
    ]
    fine = SWEEP_FILE.replace("THE TRACE", str(work / "trace.jsonl"))
    return {
        "TRACE": lambda c: c.choice(list(TRACES.values()))(c),
        "PARQUET": _parquet_file,
        "MANY": lambda c: mutate.json_lines(many, c),
        "PROFILE": lambda c: mutate.json_text(c.choice(_profiles()), c),
        "LOG": lambda c: _changed_log(c, c.choice(_logs()[:2])),
        "CLIENT": _client_file,
        "SHEET": lambda c: mutate.toml_text(planning.SHEET, c),
        "SHAPE": lambda c: mutate.json_text(c.choice((planning.DENSE, planning.SPARSE, planning.OLDER)), c),
        "POLICY": lambda c: mutate.toml_text(POLICY_FILE, c),
        "SPACE": lambda c: mutate.toml_text(SPACE_FILE, c),
        "SWEEP": lambda c: mutate.toml_text(fine, c),
        "QUALITY": lambda c: mutate.table(["policy", "threshold", "score", "baseline"], SCORES, c),
        "PROMPTS": lambda c: mutate.json_lines([[1, 2, 3], [4], list(range(20))], c),
    }


# ---- small things ---------------------------------------------------------------------------------------------


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@cache
def _held(path: Path) -> bytes:
    return path.read_bytes()


def weighted(found: list[Target]) -> Iterator[Target]:
    """Each target, as often as its weight says."""
    for target in found:
        yield from [target] * target.weight
