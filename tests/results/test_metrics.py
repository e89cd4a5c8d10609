"""Metrics against arithmetic: the worked example of docs/metrics.md, small worlds, and properties."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dsim
from dsim.engine.journal import StepTotals
from dsim.engine.spec import parse
from dsim.results.metrics import METRICS, Summary, summarize
from dsim.results.slo import Slo
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate

from ..checks import cases
from ..report.fixtures import rejected, request, request_columns, totals_of, unfinished
from ..worlds import SECOND, toy_profile, toy_trace

ROOT = Path(dsim.__file__).parent
# Prefill takes 100 ms, a step 20 ms and yields 4 tokens (AR: 5 ms, 1 token): the true pace is 5 ms a token.
STREAMS = {
    "AR 64": [(0.100 + 0.005 * i, 1) for i in range(1, 65)],
    "step-streamed 64": [(0.100 + 0.020 * i, 4) for i in range(1, 17)],
    "block-streamed 64": [(0.100 + 0.160 * i, 32) for i in range(1, 3)],
    "block-streamed 32": [(0.260, 32)],
    "block-streamed 256": [(0.100 + 0.160 * i, 32) for i in range(1, 9)],
}
# TTFT, E2EL, TPOT, norm_latency, ITL, tpot_chunk (ms); None: missing
WORKED = {
    "AR 64": (105, 420, 5.00, 6.56, 5, 5.00),
    "step-streamed 64": (120, 420, 4.76, 6.56, 20, 5.00),
    "block-streamed 64": (260, 420, 2.54, 6.56, 160, 5.00),
    "block-streamed 32": (260, 260, 0.00, 8.13, None, None),
    "block-streamed 256": (260, 1380, 4.39, 5.39, 160, 5.00),
}


def one(stream: str) -> dict[str, Any]:
    return summarize(stream, request_columns([request(STREAMS[stream])]), totals_of(STREAMS[stream])).to_json()


@cases("stream", *STREAMS)
def test_the_worked_example_holds(stream: str) -> None:
    found = one(stream)
    keys = ("ttft_ms", "e2el_ms", "tpot_ms", "norm_latency_ms", "itl_ms", "tpot_chunk_ms")
    for key, expected in zip(keys, WORKED[stream], strict=True):
        for stat in ("mean", "p50", "p99"):
            if expected is None:
                assert found[key][stat] is None
            else:
                # Two decimals; 0.05 % where a histogram answers.
                assert found[key][stat] == pytest.approx(expected, abs=0.006, rel=5e-4)


def test_a_number_s_name_says_what_it_holds() -> None:
    found = one("AR 64")
    assert list(found["batch"]) == list(found["chunk"]) == ["mean", "p50"]
    for key in found:
        assert not key.endswith("_ms") or list(found[key]) == ["mean", "p50", "p90", "p95", "p99"]


ADDED = {
    "metrics.csv": (
        "\nqueue_time,",
        "\ndecode,ms,Latency,,p50 p99,p99,low,yes,yes,Time to decode,s,finish - first emission,\nqueue_time,",
    ),
    "metrics.py": ("\n    queue_time_ms:", "\n    decode_ms: Distribution\n    queue_time_ms:"),
}
LATENCY = ('    "queue_time":', '    "decode": lambda requests: e2el(requests) - ttft(requests),\n    "queue_time":')


@pytest.mark.slow
def test_a_metric_is_a_row_a_field_and_a_function() -> None:
    def ran(*words: str) -> str:
        command = [sys.executable, "-m", "dsim", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    shutil.copytree(ROOT, Path("dsim"), ignore=shutil.ignore_patterns(".*", "benchmarks", "research", "tests"))
    for name, (before, after) in ADDED.items():
        file = Path(f"dsim/results/{name}")
        file.write_text(file.read_text().replace(before, after).replace(*LATENCY))
    replayed = ran("replay", "azure-conv", "--num-requests", "20", "--policy", "ar", "--slo", "decode=9s", "-o", "a")
    assert re.search(r"decode p99 +ms(.*\n)+ decode=9s +\d", replayed)
    assert re.search(r"\n *decode +ms.* 0 %", ran("compare", "a", "a", "--bound", "decode=1%"))
    (summary,) = json.loads(Path("a/run.json").read_text())["policies"]
    assert summary["decode_ms"]["mean"] == pytest.approx(summary["e2el_ms"]["mean"] - summary["ttft_ms"]["mean"])
    assert 'id="cdf-decode"' in Path("a/report.html").read_text()


def test_a_run_without_requests_is_all_null() -> None:
    found = summarize("ar", request_columns([]), StepTotals(), [Slo.parse("ttft=1s")]).to_json()
    json.dumps(found, allow_nan=False)
    assert found["num_requests"] == 0
    assert found["duration_s"] is found["goodput"] is found["slo_attainment"] is found["tpf"] is None
    assert found["batch"] == {"mean": None, "p50": None}


def test_a_run_that_completed_nothing_met_no_slo() -> None:
    slos = [Slo.parse("e2el=1s"), Slo.parse("p90:ttft=1s")]
    found = summarize("ar", request_columns([unfinished(), rejected()]), StepTotals(), slos).to_json()
    assert (found["completed"], found["rejected"], found["unfinished"]) == (0, 1, 1)
    assert found["slo_attainment"] == 0.0
    assert found["slos"][1] == {"slo": "p90:ttft=1s", "attainment": None, "observed_ms": None, "met": False}
    assert found["stable"] is False


def test_goodput_counts_arrivals_in_one_denominator_and_seconds_in_the_other() -> None:
    rows = [
        request([(1.0, 10)], arrival=0.0),
        request([(3.0, 10)], arrival=1.0),  # ttft above 2 s
        request([(1.0, 10), (9.0, 10)], arrival=1.0),  # ttft met, e2el not
        rejected(2.0),
        request([(2.0, 30)], arrival=3.0),  # exactly 2 s
    ]
    slos = [Slo.parse("ttft=2s"), Slo.parse("e2el=5s"), Slo.parse("mean:ttft=2s"), Slo.parse("p99:ttft=2s")]
    found = summarize("p", request_columns(rows), StepTotals(), slos).to_json()
    assert (found["duration_s"], found["goodput"]) == (10.0, pytest.approx(2 / 10))
    assert found["slo_attainment"] == pytest.approx(2 / 5)
    assert found["request_throughput"] == pytest.approx(4 / 10)
    assert found["output_throughput"] == pytest.approx(70 / 10)
    verdicts = {v["slo"]: v for v in found["slos"]}
    assert verdicts["ttft=2s"]["attainment"] == pytest.approx(3 / 5)
    assert verdicts["e2el=5s"]["attainment"] == pytest.approx(3 / 5)
    assert (verdicts["mean:ttft=2s"]["observed_ms"], verdicts["mean:ttft=2s"]["met"]) == (1750.0, True)
    assert verdicts["p99:ttft=2s"]["observed_ms"] == pytest.approx(np.percentile([1000, 3000, 1000, 2000], 99))
    assert verdicts["p99:ttft=2s"]["met"] is False


def test_a_loop_is_full_until_its_last_request_is_sent() -> None:
    rows = request_columns([request([(10.0, 100)]), request([(40.0, 100)]), request([(20.0, 50)], arrival=10.0)])
    found = summarize("p", rows, StepTotals(), closed_loop=True)
    assert (found.output_throughput, found.full_loop_throughput) == (250 / 40, (100 + 100 / 4) / 10)
    assert summarize("p", rows, StepTotals()).to_json()["full_loop_throughput"] is None


def test_an_unfinished_request_leaves_a_bound_on_the_run_unmet() -> None:
    requests = request_columns([request([(1.0, 8)]), unfinished(0.5)])
    (verdict,) = summarize("p", requests, StepTotals(), [Slo.parse("p50:ttft=2s")]).slos
    assert (verdict.observed_ms, verdict.met) == (1000.0, False)


def test_a_missing_metric_passes() -> None:
    requests = request_columns([request([(0.1, 1)]), request([(0.1, 1), (0.2, 1)])])
    assert summarize("p", requests, StepTotals(), [Slo.parse("tpot=1s")]).slo_attainment == 1.0


def test_steps_give_utilisation_per_replica() -> None:
    totals = StepTotals(
        num_decode_steps=3, prefill_time=2.0, decode_time=6.0, tokens=64, committed=16, forwards=8, prefill_tokens=900,
        page_time=400.0, num_pages=200, preemptions=3,
    )  # fmt: skip
    for batch, chunk, latency in ((2, 8, 0.010), (2, 16, 0.020), (4, 8, 0.030)):
        totals.batch.add(batch)
        totals.chunk.add(chunk)
        totals.step_latency.add(latency)
    rows = [request([(10.0, 8)], num_committed=32), request([(1.0, 8), (2.0, 8)], num_committed=32)]
    found = summarize("p", request_columns(rows), totals, replicas=2)
    assert (found.tpf, found.token_utilization) == (2.0, 0.25)
    assert found.computed_per_token == 64 / 24  # of tokens returned, and prefill is not in it
    assert found.kv_utilization == 400 / (100 * 8)  # a replica holds half of its 100 pages
    assert (found.busy_share, found.prefill_time_share, found.wasted_canvas_tokens) == (8 / 20, 0.25, 64 - 24)
    assert (found.batch.mean, found.batch.p50, found.chunk.mean, found.chunk.p50) == (8 / 3, 2, 32 / 3, 8)
    assert found.step_latency_ms.mean == pytest.approx(20.0)
    assert (found.step_latency_ms.p50, found.preemptions) == (pytest.approx(20.0, rel=5e-4), 3)


def test_a_device_is_busy_to_the_end_of_the_last_step_and_never_for_more_than_the_run() -> None:
    # Rows of a request that is over are computed on: 3 s of steps, and the request finishes after 2 s.
    table = request_columns([request([(2.0, 8)])])
    assert summarize("p", table, StepTotals(decode_time=3.0, end=3.0)).busy_share == 1.0
    assert summarize("p", table, StepTotals(decode_time=1.5, end=1.5)).busy_share == 0.75
    assert summarize("p", table, StepTotals(decode_time=3.0, end=6.0), replicas=2).busy_share == 0.25
    late = request_columns([request([(1.0, 8)], arrival=4.0)])
    assert summarize("p", late, StepTotals(decode_time=1.5, end=6.0)).busy_share == 0.75
    assert summarize("p", request_columns([]), StepTotals(decode_time=3.0, end=3.0)).busy_share is None
    # A run that ends before any request has completed was busy all the same.
    begun = {**table, "status": np.full_like(table["status"], 2), "finish": np.full_like(table["finish"], np.nan)}
    assert summarize("p", begun, StepTotals(decode_time=1.5, end=6.0)).busy_share == 0.25


def test_steps_that_outlast_the_last_completion_are_within_the_run() -> None:
    # A frozen group computes its finished rows to its end: all steps follow one another from the first arrival.
    trace = toy_trace([0.0, 0.0], [8, 8], [8, 8])
    result = simulate(trace, Setting(parse("lmdeploy-bd32,block_length=4"), toy_profile()))
    found = summarize("p", result.table.columns, result.totals)
    assert result.totals.end > result.table.columns["finish"].max()
    assert found.busy_share == pytest.approx(1.0, rel=1e-12)


outcomes = st.lists(
    st.one_of(
        st.builds(
            lambda arrival, gaps, n: request([(sum(gaps[: i + 1]), n) for i in range(len(gaps))], arrival=arrival),
            st.floats(0, 100),
            st.lists(st.floats(0.001, 10), min_size=1, max_size=4),
            st.integers(1, 9),
        ),
        st.builds(rejected, st.floats(0, 100)),
        st.builds(unfinished, st.floats(0, 100)),
    ),
    max_size=30,
)
bounds = st.lists(
    st.sampled_from(["ttft=1s", "tpot=100ms", "tpot_chunk=50ms", "norm_latency=500ms", "e2el=5s"]), max_size=3
)


@given(outcomes, bounds)
def test_attainment_is_a_share_and_goodput_never_beats_throughput(rows: list[dict[str, Any]], slos: list[str]) -> None:
    found: Summary = summarize("p", request_columns(rows), StepTotals(), [Slo.parse(s) for s in slos])
    json.dumps(found.to_json(), allow_nan=False)
    assert found.num_requests == found.completed + found.rejected + found.unfinished
    assert found.goodput is None or slos
    if found.slo_attainment is not None:
        assert 0 <= found.slo_attainment <= found.completed / found.num_requests
    if found.goodput is not None:
        assert 0 <= found.goodput * found.duration_s <= found.completed + 1e-9
    for verdict in found.slos:
        if found.slo_attainment is not None and verdict.attainment is not None:
            assert not found.slo_attainment > verdict.attainment


def test_a_step_that_prefills_one_row_and_decodes_another_counts_the_row_that_decodes() -> None:
    setting = Setting(parse("vllm-ar,async_scheduling=false"), toy_profile())
    result = simulate(toy_trace([0.0, 2.5], [8, 8], [6, 1]), setting)
    table = result.table.columns
    assert table["num_forwards"].tolist() == [5, 0]  # each first token comes from a prefill
    found = summarize("p", table, result.totals)
    assert (found.token_utilization, found.tpf, found.computed_per_token) == (1.0, 1.0, 5 / 7)


def test_busy_share_leaves_out_the_step_in_flight_as_a_run_ends() -> None:
    # Two steps of a second and more are over as the last request arrives, and the third is not.
    trace = toy_trace([0.0, 2.5], [1, 1], [9, 1])
    result = simulate(trace, Setting(parse("ar"), toy_profile(latency=SECOND)), drain=False)
    assert result.totals.end == 2.0
    assert summarize("p", result.table.columns, result.totals).busy_share == 1.0


def test_the_table_explains_every_field_of_a_summary_in_its_order() -> None:
    explained = [name.removesuffix("_ms") for name in Summary.__dataclass_fields__ if name != "policy"]
    assert (list(METRICS), METRICS["e2el"].formula) == (explained, "finish - arrival")
