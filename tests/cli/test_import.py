"""dsim import, and dsim compare on a load generator's file."""

import json
import os
from pathlib import Path

import pytest

from ..checks import cases
from .command import dsim, succeed

FILES = Path(__file__).parents[1] / "comparison" / "clients"
VLLM, TRACE = FILES / "vllm_bench.json", FILES / "vllm_trace.jsonl"


def test_a_file_becomes_a_run_with_the_metrics_of_its_requests() -> None:
    ran = dsim("import", VLLM, "--trace", TRACE, "--slo", "ttft=110ms", "-o", "m", "--json")
    assert (ran.code, ran.err) == (0, "Wrote m/ (run.json, requests.parquet, steps.parquet, report.html)\n")
    (summary,) = ran.json["policies"]
    assert summary["completed"] == 8
    ttfts = json.loads(VLLM.read_text())["ttfts"]
    assert summary["slo_attainment"] == sum(ttft <= 0.11 for ttft in ttfts) / 8
    assert sorted(os.listdir("m")) == ["report.html", "requests.parquet", "run.json", "steps.parquet"]
    page = Path("m/report.html").read_text()
    assert "<code>dsim import" in page
    for unknown in ('id="queue"', 'id="batch"', '"label":"waiting"', '"label":"batch"'):
        assert unknown not in page  # a client's file does not know them


def test_the_report_tells_of_the_client() -> None:
    ran = succeed("import", FILES / "aiperf.jsonl", "--trace", FILES / "trace.jsonl")
    assert "Measured by: aiperf" in ran.out
    assert "Client: aiperf, 0 requests failed" in ran.out
    assert "Lateness: requests were sent " in ran.out


def test_a_file_compares_with_a_prediction_of_its_trace() -> None:
    succeed("replay", TRACE, "--policy", "ar", "-o", "predicted")
    succeed("import", VLLM, "--trace", TRACE, "--policy", "ar", "-o", "m")
    ran = dsim("compare predicted m --json")
    assert (ran.code, ran.err) == (0, "")
    (cell,) = ran.json["cells"]
    assert (cell["policy"], cell["metrics"]["e2el"]["requests"]["num"]) == ("ar", 8)
    assert cell["no_parts"] == "m has no step journal"
    assert ran.json["pairs"][0]["measured"]["driver"] == "client"
    assert dsim("compare predicted", VLLM).refusal == (
        f"{VLLM}: is a file, expected a run's folder: make it one with dsim import {VLLM} -o DIR"
    )


def test_hash_ids_are_as_many_as_a_prompt_has_blocks_and_no_one_elses() -> None:
    succeed("trace convert", TRACE, "out.jsonl")
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [len(row["hash_ids"]) for row in rows] == [-(-row["input_length"] // 16) for row in rows]
    ids = [i for row in rows for i in row["hash_ids"]]
    assert len(set(ids)) == len(ids)
    assert {row["block_size"] for row in rows} == {16}


@cases("command", "import", "compare")
def test_what_was_asked_for_is_written_before_a_reader_can_leave(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def left(*_: object, **__: object) -> None:
        raise BrokenPipeError

    dsim("import", VLLM, "--trace", TRACE, "-o", "m")
    monkeypatch.setattr("dsim.report.text.render", left)
    dsim(command, *((VLLM, "--trace", TRACE) if command == "import" else ("m", "m")), "-o", "out")
    assert (Path("out") / "report.html").is_file()


@cases("replicas", 0, -3, 10**30)
def test_replicas_that_no_server_has_are_refused(replicas: int) -> None:
    said = dsim("import", VLLM, "--replicas", str(replicas), "-o", "run").refusal
    assert said == f"replicas is {replicas}, expected 1 to 4096"
