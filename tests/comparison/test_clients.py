"""Files that load generators wrote of one vLLM server, read as runs: dsim's figures beside the clients' own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.comparison.clients.client_file import read_client
from dsim.comparison.clients.match import Requested
from dsim.comparison.clients.measured import MeasuredRun, measured_run, write_measured
from dsim.engine.journal import STATUSES
from dsim.results.run import read_run
from dsim.traces import load

from ..checks import cases, refused

FILES = Path(__file__).parent / "clients"
TRACES = {"vllm_bench.json": "vllm_trace.jsonl", "guidellm.json": "trace.jsonl", "aiperf.jsonl": "trace.jsonl"}


def requested(name: str) -> Requested:
    trace = load(FILES / name)
    return Requested(name, trace.arrival, trace.input_length, trace.output_length)


def imported(name: str) -> MeasuredRun:
    return measured_run(read_client(FILES / name), requested(TRACES[name]))


def changed(name: str, change: Callable[[Any], object]) -> MeasuredRun:
    """A client's file with something changed in it, imported."""
    value = json.loads((FILES / name).read_text())
    change(value)
    Path(name).write_text(json.dumps(value))
    return measured_run(read_client(name), requested(TRACES[name]))


@cases("name", *TRACES)
def test_requests_are_the_traces_in_its_order(name: str) -> None:
    run, asked = imported(name), requested(TRACES[name])
    columns = run.columns
    assert columns["request"].tolist() == list(range(8))
    assert columns["arrival"].tolist() == asked.arrival.tolist()
    assert columns["input_length"].tolist() == asked.input_length.tolist()
    assert columns["num_tokens"].tolist() == columns["output_length"].tolist() == asked.output_length.tolist()
    assert run.info.client.warnings == ()


def test_vllms_latencies_are_the_arrays_of_its_file() -> None:
    file = json.loads((FILES / "vllm_bench.json").read_text())
    columns = imported("vllm_bench.json").columns
    assert columns["first_emission"] - columns["arrival"] == pytest.approx(file["ttfts"])
    assert columns["finish"] - columns["arrival"] == pytest.approx(file["latencies"])
    assert columns["num_emissions"].tolist() == [1 + len(gaps) for gaps in file["itls"]]
    summary = imported("vllm_bench.json").info.policies[0]
    assert summary.itl_ms.mean == pytest.approx(1e3 * np.mean([gap for gaps in file["itls"] for gap in gaps]))
    ttft, e2el, tokens = (np.array(file[name]) for name in ("ttfts", "latencies", "output_lens"))
    assert summary.tpot_ms.mean == pytest.approx(1e3 * np.mean((e2el - ttft) / (tokens - 1)))


def test_aiperfs_tokens_are_the_servers() -> None:
    run = imported("aiperf.jsonl")
    rows = [json.loads(line)["metrics"] for line in (FILES / "aiperf.jsonl").read_text().splitlines()]
    assert sorted(run.columns["num_tokens"].tolist()) == sorted(r["usage_completion_tokens"]["value"] for r in rows)
    assert [r["output_sequence_length"]["value"] == r["usage_completion_tokens"]["value"] for r in rows].count(False)


def test_a_late_client_changes_no_latency_and_its_lateness_is_told() -> None:
    def late(file: Any) -> None:
        file["start_times"][3] += 0.4

    on_time = imported("vllm_bench.json")
    run = changed("vllm_bench.json", late)
    for name in ("arrival", "first_emission", "finish"):
        assert run.columns[name] == pytest.approx(on_time.columns[name])
    assert run.columns["lateness"][3] - on_time.columns["lateness"][3] == pytest.approx(0.4)
    assert run.info.client.lateness_ms.max == pytest.approx(1e3 * run.columns["lateness"][3])
    # Without a trace a request arrives when it was sent.
    alone = measured_run(read_client("vllm_bench.json"))
    (arrival,) = alone.columns["arrival"][alone.columns["request"] == 3]
    assert arrival - on_time.columns["arrival"][3] == pytest.approx(0.4, abs=0.01)
    assert np.isnan(alone.columns["lateness"]).all()


def test_requests_that_arrive_at_once_are_told_apart_by_their_lengths() -> None:
    def swap(file: Any) -> None:
        for values in file.values():
            if isinstance(values, list):
                values[0], values[1] = values[1], values[0]

    run = changed("vllm_bench.json", swap)
    for name, column in imported("vllm_bench.json").columns.items():
        if name not in ("lateness", "arrival"):  # which came a fraction of a ms earlier is the client's affair
            assert run.columns[name] == pytest.approx(column, nan_ok=True), name


def test_failures_are_counted_with_their_reasons_and_have_no_latency() -> None:
    def fail(file: Any) -> None:
        file["errors"][2] = "Service Unavailable"
        file["errors"][5] = "Service Unavailable"

    run = changed("vllm_bench.json", fail)
    assert run.info.client.errors == {"Service Unavailable": 2}
    summary = run.info.policies[0]
    assert (summary.completed, summary.rejected, summary.unfinished) == (6, 2, 0)
    assert np.isnan(run.columns["finish"][[2, 5]]).all()
    assert run.columns["input_length"].tolist() == requested("vllm_trace.jsonl").input_length.tolist()


def test_what_the_client_gave_up_is_unfinished() -> None:
    def cut(file: Any) -> None:
        requests = file["benchmarks"][0]["requests"]
        requests["incomplete"] = [requests["successful"].pop()]

    run = changed("guidellm.json", cut)
    assert np.bincount(run.columns["status"], minlength=len(STATUSES)).tolist() == [7, 0, 1, 0]


def test_a_request_that_the_file_lacks_is_left_out_by_the_traces_time() -> None:
    def drop(file: Any) -> None:
        rows = file["benchmarks"][0]["requests"]["successful"]
        rows.remove(min(rows, key=lambda row: row["info"]["settings"]["relative_timestamp"]))

    run = changed("guidellm.json", drop)
    assert run.columns["request"].tolist() == list(range(1, 8))
    assert run.info.client.warnings == ()


def test_another_servers_token_counts_are_used_and_told() -> None:
    def longer(file: Any) -> None:
        file["input_lens"] = [n + 1 for n in file["input_lens"]]  # a BOS

    run = changed("vllm_bench.json", longer)
    assert run.columns["input_length"].tolist() == [n + 1 for n in requested("vllm_trace.jsonl").input_length]
    (line,) = run.info.client.warnings
    assert line.startswith("8 of 8 requests have prompt lengths other than the trace's (in sum +")


def test_a_pace_that_nobody_counted_is_missing_not_guessed() -> None:
    columns = imported("aiperf.jsonl").columns
    coalesced = columns["num_emissions"] != columns["num_tokens"]
    assert coalesced.any()
    assert (~coalesced).any()
    assert (columns["num_first"] == np.where(coalesced, columns["num_tokens"], 1)).all()


def test_a_written_run_reads_back_with_the_columns_of_its_client() -> None:
    run = imported("guidellm.json")
    write_measured(run, "run")
    back = read_run("run")
    assert back.num_steps == 0
    for name, column in run.columns.items():
        assert np.array_equal(back.requests("server", [name])[name], column, equal_nan=column.dtype.kind == "f"), name
    assert back.info.client.tool == "guidellm 0.8.1"
    assert Path("run/report.html").stat().st_size > 10_000


def test_more_requests_than_the_trace_has_are_refused() -> None:
    asked = requested("vllm_trace.jsonl")
    short = Requested("short", asked.arrival[:5], asked.input_length[:5], asked.output_length[:5])
    with refused("holds 8 requests, short holds 5: expected at most as many"):
        measured_run(read_client(FILES / "vllm_bench.json"), short)
