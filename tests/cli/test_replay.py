"""dsim replay, from arguments to what is printed, written and refused."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.results import world
from dsim.results.metrics import PrefixCache, Summary
from dsim.results.run import read_run
from dsim.results.run_folder import FILES, RunWriter
from dsim.results.run_info import RunInfo, TraceInfo

from ..checks import cases, refused
from ..held_up import PATIENCE, wait_until
from .command import dsim, held, rows, succeed


@pytest.fixture
def trace() -> str:
    """Twelve requests, five a second, for 100 tokens in and 48 out."""
    Path("small.jsonl").write_text(rows(12))
    return "small.jsonl"


def policies(*arguments: object) -> Any:
    ran = dsim("replay", *arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    return ran.json["policies"]


def files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_json_has_the_keys_that_were_promised(trace: str) -> None:
    ran = dsim("replay", trace, "--policy", "optimus", "--policy", "ar", "--slo", "ttft=2s", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert RunInfo.from_json(ran.json).to_json() == ran.json
    assert [p["policy"] for p in ran.json["policies"]] == ["optimus", "ar"]
    for p in ran.json["policies"]:
        assert set(p) == set(Summary.__dataclass_fields__)
        assert (p["num_requests"], p["completed"], p["rejected"], p["unfinished"]) == (12, 12, 0, 0)
        assert (p["stable"], p["slo_attainment"], p["preemptions"]) == (True, 1.0, 0)
        assert p["goodput"] == p["request_throughput"] == 12 / p["duration_s"]
        assert p["output_throughput"] == pytest.approx(12 * 48 / p["duration_s"])


def test_each_thing_is_resolved_once(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def count(name: str) -> None:
        original = getattr(world, name)
        monkeypatch.setattr(world, name, lambda *values, **more: calls.append(name) or original(*values, **more))

    world._load_profile.cache_clear()
    for name in ("load", "parse", "load_profile", "Setting", "simulate"):
        count(name)
    succeed("replay", trace, "--policy", "optimus", "--policy", "ar", "-o", "run")
    assert Counter(calls) == {"load": 1, "load_profile": 1, "parse": 2, "Setting": 2, "simulate": 2}


def test_json_is_one_object_alone_on_stdout_even_when_there_is_much_to_say() -> None:
    # Out of order, overloaded, one row rejected.
    text = rows(60, gap=1, prompt=3000) + '{"timestamp": 0, "input_length": 40000, "output_length": 9}\n'
    Path("odd.jsonl").write_text(text)
    ran = succeed("replay odd.jsonl --policy ar,max_batch=1 --json --no-drain -o run")
    assert ran.out.count("\n") == 1
    (p,) = ran.json["policies"]
    assert p["rejected"] == 1
    assert p["unfinished"] > 0
    assert p["stable"] is False
    # Warnings and what it did go to the other stream.
    assert "1 rows were out of order" in ran.err
    assert ran.err.splitlines()[-1] == "Wrote run/ (run.json, requests.parquet, steps.parquet, report.html)"


def test_policies_stand_side_by_side_under_their_specs(trace: str) -> None:
    specs = ["chunk:8", "optimus,num_blocks=2", "lmdeploy-bd32,max_batch=4"]
    ran = dsim("replay", trace, *(word for spec in specs for word in ("--policy", spec)), "--slo", "e2el=60s")
    assert (ran.code, ran.err) == (0, "")
    assert held(Path()) == [trace]  # nothing was written without -o
    lines = ran.out.splitlines()
    assert lines[0] == "Every policy meets the SLOs for 100.0 % of requests."
    assert next(line for line in lines if "unit" in line).split() == ["unit", *specs]
    completed = next(line for line in lines if line.split()[:1] == ["completed"])
    assert completed.split() == ["completed", "requests", "12", "12", "12"]
    assert [line for line in lines if "estimated, not measured" in line] == [
        "Profile: a100-sdar-8b (SDAR-8B, A100-80GB, LMDeploy eager, fork of Dec 2025): estimated, not measured"
    ]


def test_a_front_end_is_part_of_every_time_from_an_arrival_and_the_report_says_so(trace: str) -> None:
    (bare,) = policies(trace, "--policy", "optimus")
    ran = dsim("replay", trace, "--policy", "optimus", "--frontend", 0.05)
    (behind,) = policies(trace, "--policy", "optimus", "--frontend", 0.05)
    for name in ("ttft_ms", "e2el_ms"):
        assert behind[name]["mean"] == pytest.approx(bare[name]["mean"] + 50)
    assert behind["itl_ms"] == pytest.approx(bare["itl_ms"])
    assert "Front end: 50.0 ms between a client and the engine, part of every time from an arrival\n" in ran.out


def test_a_policy_file_is_the_spec_it_says(trace: str) -> None:
    Path("mine.toml").write_text('policy = "optimus"\nnum_blocks = 2\nmax_chunk = 16\nmax_batch = 6\n')
    (by_file,) = policies(trace, "--policy", "mine.toml")
    (by_spec,) = policies(trace, "--policy", "optimus,num_blocks=2,max_chunk=16,max_batch=6")
    assert by_file.pop("policy") == "mine.toml"
    assert by_spec.pop("policy") == "optimus,num_blocks=2,max_chunk=16,max_batch=6"
    assert by_file == by_spec


def test_what_the_engine_refuses_is_one_line(trace: str) -> None:
    ran = dsim(f"replay {trace} --profile h100-diffusiongemma-fp8 --policy sglang-gemma")
    assert (ran.code, ran.err) == (
        2,
        "Error: sglang-gemma: h100-diffusiongemma-fp8 has weights of fp8, and SGLang 0.5.23 refuses a quantised "
        "DiffusionGemma: expected bf16 weights, or vllm-diffusion\n",
    )


def test_bad_rows_are_skipped_and_counted_when_asked() -> None:
    Path("t.jsonl").write_text(rows(5) + "{broken\n" + '{"timestamp": 1, "input_length": -4, "output_length": 1}\n')
    assert dsim("replay t.jsonl").code == 2
    ran = succeed("replay t.jsonl --skip-bad -o run")
    assert "Note: skipped rows of the trace that could not be read: 2" in ran.out.splitlines()
    assert read_run("run").info.trace.skipped_bad == 2
    assert read_run("run").info.trace.num_requests == 5


CACHED = "vllm-ar,prefix_caching=true"


@pytest.mark.slow
def test_a_prefix_cache_is_counted_in_the_report_the_object_and_the_request_table() -> None:
    asked = "replay mooncake-conv --num-requests 11 --profile h100-qwen3-8b-ar --replicas 2"
    ran = succeed(asked, f"--router prefix --policy vllm-ar --policy {CACHED} -o run")
    assert "the trace has hash_ids, and vllm-ar computes prompts whole: prefix_caching=true reuses prefixes" in ran.out
    bare, cached = read_run("run").info.policies
    assert bare.prefix_cache is None
    # All eleven begin with the same 512 tokens and no more: only each replica's first finds nothing.
    columns = read_run("run").requests(CACHED, ["replica", "input_length", "cached_tokens"])
    found, first = columns["cached_tokens"], [columns["replica"].tolist().index(r) for r in (0, 1)]
    assert found.dtype == "int32"
    assert (np.delete(found, first) == 512).all()
    assert found[first].tolist() == [0, 0]
    queries = columns["input_length"].sum()
    assert cached.prefix_cache == PrefixCache(queries, found.sum(), found.sum() / queries)
    assert read_run("run").requests("vllm-ar", ["cached_tokens"])["cached_tokens"].tolist() == [0] * 11
    assert "prefix cache hits" in ran.out
    # What was computed is the less.
    assert cached.ttft_ms.mean < bare.ttft_ms.mean
    _, cell = succeed("compare run run --json").json["cells"]
    assert cell["no_parts"] == (f"run: {CACHED} reused pages, and a run does not keep what its requests begin with")


def test_a_prefix_cache_that_can_find_nothing_is_warned_of_with_the_count(trace: str) -> None:
    ran = succeed("replay", trace, "--policy", CACHED, "--profile", "h100-qwen3-8b-ar", "-o", "run")
    assert "Warning: prefixes are used and 0 of 12 requests have hash_ids or a session_id" in ran.err.splitlines()
    assert read_run("run").info.policies[0].prefix_cache == PrefixCache(1200, 0, 0.0)


def test_sessions_turns_wait_for_each_other_when_asked() -> None:
    turns = [{"timestamp": 0, "input_length": 100 * i, "output_length": 50, "session_id": "a"} for i in (1, 2, 3)]
    Path("chat.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    succeed("replay chat.jsonl --policy ar --sessions -o run")
    columns = read_run("run").requests("ar", ["arrival", "finish"])
    assert columns["arrival"].tolist() == [0.0, *columns["finish"][:2]]
    assert read_run("run").info.trace.arrival == "trace, turns of a session one after another"
    refused = dsim("replay chat.jsonl --sessions --concurrency 2").refusal
    assert refused == "concurrency is 2 and sessions is true, expected one of them"


def test_a_run_is_a_folder_of_four_files(trace: str) -> None:
    ran = succeed("replay", trace, "--policy optimus --policy ar --slo ttft=2s -o runs/a --json")
    assert held(Path()) == ["runs", "runs/a", *sorted(f"runs/a/{name}" for name in FILES[:4]), trace]
    run = read_run("runs/a")
    assert (run.policies, run.info.to_json()) == (["optimus", "ar"], ran.json)
    assert (run.info.seed, run.info.slos, run.info.interrupted) == (0, ("ttft=2s",), False)
    report = Path("runs/a/report.html").read_text()
    assert "estimated, not measured" in report
    assert "<script src=" not in report  # it holds all it needs


def test_a_rerun_gives_the_same_bytes_in_every_file(trace: str) -> None:
    arguments = f"replay {trace} --policy optimus --policy lmdeploy-bd32 --replicas 2 --seed"
    for folder in ("a", "b"):
        succeed(arguments, "5 -o", folder)
    assert files("a") == files("b")
    said = "holds report.html, requests.parquet, run.json, steps.parquet: choose another folder or pass --force"
    assert dsim(arguments, "5 -o a").refusal.endswith(f"exists and {said}")
    assert files("a") == files("b")
    succeed(arguments, "6 -o c")
    assert files("a").keys() == files("c").keys()
    assert files("a")["steps.parquet"] != files("c")["steps.parquet"]


@cases(
    "arguments said",
    ("--policy optimis", "policy 'optimis': no preset is named 'optimis' (did you mean optimus?); there are"),
    ("--policy chunk:33", "policy 'chunk:33': chunk is 33, expected at most the block length 32"),
    ("--policy ar --policy ar", "policy ar is given 2 times, expected once"),
    (
        "--policy ar --policy optimus,threshold=0.5",  # the last one's is told before any work
        "profile a100-sdar-8b holds commit models of threshold 0.9, 0.8; this run asks for 0.5",
    ),
    ("--router luck", "router is 'luck', expected one of round-robin, random, least-tokens, jsq"),
)
def test_bad_arguments_are_one_line_with_both_values(arguments: str, said: str, trace: str) -> None:
    assert dsim("replay", trace, arguments, "-o deep/run").refusal.startswith(said)
    assert held(Path()) == [trace]


@cases(
    "command num_warnings",
    ("trace info azure-conv", 1),
    ("replay azure-conv --policy ar --num-requests 60", 2),
    ("tune azure-conv --num-requests 60 --slo ttft=20s --trials 1", 2),
    ("sweep c.toml -o runs --jobs 1", 2),
)
def test_a_file_named_like_a_shipped_trace_and_a_run_longer_than_it_are_said(
    command: str, num_warnings: int, two_replications: None
) -> None:
    Path("azure-conv").write_text(rows(40))
    Path("c.toml").write_text('base = {trace = "azure-conv", num_requests = 60}\ngrid = {policy = ["ar", "chunk"]}\n')
    ran = dsim(command)
    said = [re.split("(?:[Ww]arning|Note): ", line) for line in (ran.out + ran.err).splitlines()]
    warnings = [parts[1] for parts in said if len(parts) > 1]
    assert ran.code == 0, ran.err
    assert [line for line in warnings if "azure-conv" in line] == [
        "azure-conv is read from the file of this name, not from the shipped trace",
        "azure-conv holds 40 requests and the run asks for 60: it begins again",
    ][:num_warnings]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_ctrl_c_writes_what_is_done_and_says_so() -> None:
    words = "azure-conv --arrival poisson --rate 8 --num-requests 500000 --policy ar --policy optimus -o run --json"
    child = subprocess.Popen(
        [sys.executable, "-m", "dsim", "replay", *words.split()],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        # It works once it has handed on some steps.
        wait_until(lambda: any(p.stat().st_size > 100_000 for p in Path().glob(".run.*/steps.parquet")), child)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=PATIENCE)
    finally:
        child.kill()
    assert child.returncode == 130, err
    shown = json.loads(out)
    assert shown["interrupted"] is True
    # The second policy was not begun.
    (p,) = shown["policies"]
    assert 0 < p["completed"] < p["num_requests"] < 500_000
    # Lines of progress come where this took long.
    lines = [line for line in err.splitlines() if not line.startswith(("ar: ", "Warning: "))]
    assert lines[0].startswith(f"Interrupted: ar had served {p['completed']} of 500000 requests")
    assert (lines[1], len(lines)) == ("Wrote run/ (run.json, requests.parquet, steps.parquet, report.html)", 2)
    assert held(Path()) == ["run", *sorted(f"run/{name}" for name in FILES[:4])]
    run = read_run("run")
    assert run.info.interrupted is True
    assert run.num_steps > 1000
    assert "INTERRUPTED" in Path("run/report.html").read_text()


def test_what_came_to_the_folders_place_during_the_run_is_kept(trace: str) -> None:
    with RunWriter("run") as writer:
        beside = dsim("replay", trace, "--policy", "ar", "-o", "run")
        assert (beside.code, beside.err.partition(": ")[2]) == (
            2, f"{Path.cwd()}/run: another dsim is writing there: wait for it, or choose another folder\n"
        )  # fmt: skip
        succeed("replay", trace, "--policy", "ar", "-o", "other")
        Path("other").rename("run")
        taken = files("run")
        with refused("exists and holds"):
            writer.finish(RunInfo(trace=TraceInfo("none")))
    assert files("run") == taken
    assert sorted(os.listdir()) == ["run", trace]
