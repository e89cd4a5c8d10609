"""What /metrics shows: the names, types, labels and buckets of the releases, and the journal's numbers."""

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from dsim.engine.errors import DsimError
from dsim.following.replayed import handles_of
from dsim.serve.metric import Face
from dsim.serve.metrics import FACES, Encoded, Families, face_of
from dsim.serve.open import Behind
from dsim.serve.tallies import Buckets
from dsim.serve.watch import Handles

from .plain_pages import families
from .serving import Running, serving, until
from .twins import CHUNK, FAST, SLOW

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "serve-metrics.md"
SMALL = "block_length=4,num_pages=64"


def record(face: Face) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "data" / f"{face.engine}.json").read_text())
    return found


@pytest.mark.parametrize("engine", FACES)
def test_names_types_labels_and_buckets_are_the_releases(engine: str) -> None:
    face = face_of("chunk", engine)
    released = record(face)["metrics"]
    for metric in face.metrics:
        if metric.name.startswith("http_"):  # of prometheus-fastapi-instrumentator
            continue
        theirs = released[metric.name.removesuffix("_info") if "backend" in metric.name else metric.name]
        assert metric.kind == theirs["type"].replace("info", "gauge"), metric.name
        if theirs["labels"] is not None:
            labels = metric.labels if metric.name != "vllm:admission_rejections" else ("model_name", *metric.labels)
            labels = labels if not metric.name.startswith("sglang:routing_key_") else ()  # added by GaugeHistogram
            assert [label for label in labels if label != "pid"] == theirs["labels"], metric.name
        if metric.kind == "histogram":
            edges = theirs["edges"]
            assert metric.edges == (None if edges == "1-2-5" else pytest.approx(edges, rel=1e-12)), metric.name
    assert face.release.split()[1] == record(face)["version"]


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text;version=1.0.0"])
def test_new_values_are_written_into_the_text_as_the_encoder_writes_them(accept: str) -> None:
    encoder, _ = choose_encoder(accept)

    def made(values: list[float]) -> list[Any]:
        found: list[Any] = [
            CounterMetricFamily("one:asked", "How many\nwere asked.", labels=["of"]),
            HistogramMetricFamily("one:waited", "s", labels=["of"]),
            GaugeMetricFamily("empty", "Without a series."),
        ]
        for name in ("a b", 'c "1"\u2028\n# d 2'):
            found[0].add_metric([name], values[0])
            found[0].add_sample("one:asked_created", {"of": name}, values[1])
            found[1].add_metric([name], [("1.0", values[2]), ("+Inf", values[3])], values[4])
        return found

    rng = np.random.default_rng(1)
    first = made([0.0] * 5)
    encoded = [Encoded(encoder, [], family) for family in first]
    drawn = rng.random((5, 5)) * 10.0 ** np.arange(-3, 12, 3)
    for values in [*drawn.tolist(), [math.inf, math.nan, 1.0, 2e6, -1.0]]:
        for family, of in zip(made(values), encoded, strict=True):
            whole = encoder(Families((family,))).removesuffix(encoder(Families(())))
            assert of.text([sample.value for sample in family.samples]) == whole


@pytest.mark.parametrize("engine", FACES)
def test_the_page_names_each_metric_of_the_release_that_the_twin_leaves_out(engine: str) -> None:
    face = face_of("chunk", engine)
    ours = {metric.name for metric in face.metrics}
    heading = f"## {face.release}"
    section = PAGE.read_text().split(heading)[1].split("\n## ")[0].partition("Left out:")[2]
    patterns = [f"{engine}:{word}" for word in section.split("`")[1::2]]
    left_out = set(record(face)["metrics"]) - ours - {"lmdeploy:backend_config"}
    assert {name for name in left_out if not any(fnmatchcase(name, p) for p in patterns)} == set()
    assert [p for p in patterns if not any(fnmatchcase(name, p) for name in left_out)] == []
    assert [p for p in patterns if any(fnmatchcase(name, p) for name in ours)] == []


PLAIN = [
    ("vllm", f"vllm-diffusion,canvas_length=8,max_num_seqs=4,{SMALL.split(',')[1]}"),
    ("sglang", "sglang-fdfo,max_running_requests=4,block_length=4,num_pages=16,page_size=4,prefix_caching=true"),
    ("lmdeploy", f"lmdeploy-bd32,max_batch=4,page_size=8,{SMALL}"),
]


def cancelled(server: Running) -> int:
    """Requests that were counted as such, after one more client has left (perhaps too late)."""
    leaving = server.begin(prompt=[1], max_tokens=30, stream=True)
    leaving.getresponse().close()
    leaving.close()
    return server.behind.fleet.replicas[0].watch.num_cancelled


@pytest.mark.parametrize(("engine", "policy"), PLAIN)
def test_the_page_has_all_that_a_plain_server_of_the_release_shows(
    twin: Callable[..., Behind], engine: str, policy: str
) -> None:
    """The record is the output of the releases' own code (plain_pages.py)."""
    plain = json.loads((HERE / "data" / f"{engine}-plain.json").read_text())
    behind = twin(policy=policy)
    with serving(behind) as server:
        start = families(server.ask("GET", "/metrics").body.decode())
        for i in range(12):  # each prompt comes twice, and all do not fit into a small pool
            assert server.complete(prompt=[i // 2] * 30, max_tokens=8, stream=True).status == 200
        assert server.ask("GET", "/nothing").status == 404
        until(lambda: cancelled(server) > 0)
        found = families(server.ask("GET", "/metrics").body.decode())
    shown = {name: family for name, family in found.items() if not name.startswith("dsim_")}
    assert {name for name in start if name in shown} == {name for name in plain if plain[name].pop("from_start")}
    assert shown == plain


def test_a_policy_shows_the_metrics_of_its_engine() -> None:
    found = {name: face_of(name).engine for name in ("vllm-diffusion", "sglang-fdfo", "lmdeploy-bd32", "optimus", "ar")}
    assert list(found.values()) == ["vllm", "sglang", "lmdeploy", "vllm", "vllm"]
    with pytest.raises(DsimError, match=r"^--metrics-as is sglan, expected one of vllm, sglang, lmdeploy$"):
        face_of("optimus", "sglan")


def samples(server: Running) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """All samples by name, then by labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(server.ask("GET", "/metrics").body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(found: dict[str, Any], name: str, **labels: str) -> float:
    return math.fsum(v for given, v in found[name].items() if set(labels.items()) <= set(given))


LIVED = [
    ("vllm", CHUNK, "vllm:request_success_total"),
    ("vllm", f"vllm-diffusion,canvas_length=8,max_num_seqs=4,{SMALL.split(',')[1]}", "vllm:request_success_total"),
    ("sglang", f"sglang-fdfo,max_running_requests=4,{SMALL}", "sglang:num_requests_total"),
    ("lmdeploy", f"lmdeploy-bd32,max_batch=4,page_size=8,{SMALL}", "lmdeploy:request_success_total"),
]


@pytest.mark.parametrize(("engine", "policy", "served"), [LIVED[0], LIVED[2], LIVED[3]])
def test_the_numbers_are_the_journals(twin: Callable[..., Behind], engine: str, policy: str, served: str) -> None:
    behind = twin(policy=policy, replicas=2)
    with serving(behind) as server:
        for i in range(6):
            assert server.complete(prompt=[0] * (1 + i), max_tokens=8 + i, stream=i % 2 == 0).status == 200
        found = samples(server)
        again = samples(server)
    table, steps = behind.columns(), server.totals
    assert steps is not None
    assert total(found, served) == total(again, served) == 6
    assert total(found, f"{engine}:prompt_tokens_total") == 21
    assert total(found, f"{engine}:generation_tokens_total") == table["num_tokens"].sum() == 63
    waits = {
        "time_to_first_token_seconds": table["first_emission"] - table["arrival"],
        "e2e_request_latency_seconds": table["finish"] - table["arrival"],
    }
    for name, seconds in waits.items():
        assert total(found, f"{engine}:{name}_count") == 6
        assert total(found, f"{engine}:{name}_sum") == pytest.approx(seconds.sum())
        for given, count in found[f"{engine}:{name}_bucket"].items():
            edge, labels = dict(given)["le"], {k: v for k, v in given if k != "le"}
            rows = np.ones(6, bool)
            if "engine" in labels:
                rows &= table["replica"] == int(labels["engine"])
            if "is_streaming" in labels:
                rows &= (np.arange(6) % 2 == 0) == (labels["is_streaming"] == "true")
            assert count == (seconds[rows] <= float(edge)).sum(), (name, given)
    if engine == "vllm":
        assert total(found, "vllm:diffusion_num_denoising_steps_total") == steps.forwards
        assert total(found, "vllm:diffusion_num_committed_tokens_total") == steps.committed
        assert total(found, "vllm:num_requests_waiting_by_reason") == 0
        assert total(found, "vllm:cache_config_info", block_size="8", num_gpu_blocks="64") == 2
        gaps = table["num_emissions"].sum() - 6
        assert total(found, "vllm:inter_token_latency_seconds_count") == gaps
        assert total(found, "http_requests_total", handler="/v1/completions", status="2xx", method="POST") == 6
        assert total(found, "http_request_size_bytes_count") == 6  # /metrics is not counted
        assert total(found, "http_request_size_bytes_sum") > 6 * 20
        answered = found["http_request_duration_highr_seconds_sum"][()]
        assert answered >= (table["finish"] - table["arrival"]).sum()
    if engine == "sglang":
        busy = total(found, "sglang:forward_execution_seconds_total")
        assert busy == pytest.approx(steps.prefill_time + steps.decode_time)
        assert total(found, "sglang:scheduler_stage_seconds_total", category="run_batch") == pytest.approx(busy)
        passes = total(found, "sglang:cuda_graph_passes_total")
        assert passes == steps.num_prefill_steps + steps.num_decode_steps
        memory, gib = behind.fleet.memory, 1 << 30
        assert memory is not None
        parts = [
            total(found, f"sglang:{name}_gb") / 2
            for name in ("weight_memory_usage", "kv_cache_memory_usage", "startup_available_gpu_memory")
        ]
        pool = behind.fleet.engines[0].policy.memory.page_size * 64 * memory.kv_bytes_per_token
        assert parts[:2] == [memory.weight_bytes / gib, pool / gib]
        assert sum(parts) == pytest.approx(memory.capacity_bytes / gib)
        assert total(found, "sglang:scheduler_process_cpu_seconds_total") > 0
        assert total(found, "sglang:per_stage_req_latency_seconds_count", stage="request_process") == 6
        assert total(found, "sglang:http_responses_total", endpoint="/v1/completions", status_code="200") == 6
        assert total(found, "sglang:gen_throughput") == 0  # as the release says of a diffusion model
        assert total(found, "sglang:realtime_tokens_total", mode="prefill_compute") == total(
            found, "sglang:prefill_effective_tokens_total", mode="input"
        )
    assert total(found, "dsim_simulated") == 1
    assert total(found, "dsim_simulated_time_seconds") > 0


def test_evictions_lost_pages_and_prefills_are_counted_as_sglang_does(twin: Callable[..., Behind]) -> None:
    policy = "vllm-ar,page_size=16,num_pages=8,max_num_seqs=4,max_num_batched_tokens=16,prefix_caching=true"
    behind = twin(policy=policy, metrics_as="sglang")
    with serving(behind) as server:
        with ThreadPoolExecutor(4) as pool:
            for reply in pool.map(lambda i: server.complete(prompt=[i] * 20, max_tokens=40), range(8)):
                assert reply.status == 200
        found = samples(server)
    engine, table = behind.fleet.engines[0], behind.columns()
    assert total(found, "sglang:num_retracted_requests_total") == table["num_preemptions"].sum() > 0
    assert total(found, "sglang:num_retracted_input_tokens_total") == 20 * table["num_preemptions"].sum()
    lost = total(found, "sglang:num_retracted_output_tokens_total")
    assert 0 < lost < 40 * table["num_preemptions"].sum()
    assert total(found, "sglang:evicted_tokens_total", cache_type="UnifiedRadixCache") == 16 * engine.evicted_pages > 0
    assert total(found, "sglang:eviction_duration_seconds_sum") == 0
    prefills = {"stage": "prefill_forward"}
    assert total(found, "sglang:per_stage_req_latency_seconds_count", **prefills) == 8
    begun = (table["first_emission"] - table["scheduled"]).sum()
    assert total(found, "sglang:per_stage_req_latency_seconds_sum", **prefills) == pytest.approx(begun)
    chunks = total(found, "sglang:per_stage_req_latency_seconds_count", stage="chunked_prefill")
    assert chunks >= 8  # 20 tokens are two chunks of at most 16


def test_a_request_that_waits_or_runs_or_goes_away_is_counted_so(twin: Callable[..., Behind]) -> None:
    behind = twin(policy="lmdeploy-bd32,max_batch=1,block_length=4,num_pages=64,page_size=8", speed=0.1)
    with serving(behind, drain=0.1) as server:
        first = server.begin(prompt=[1], max_tokens=200, stream=True)
        answer = first.getresponse()
        assert answer.readline().startswith(b"data: ")
        second = server.begin(prompt=[1], max_tokens=4)
        until(lambda: behind.fleet.replicas[0].num_queued == 1)  # once the step in which it came is over
        found = samples(server)
        kinds = ("requests_running", "requests_waiting", "api_requests_routed", "api_requests_waiting")
        assert [total(found, f"lmdeploy:num_{kind}") for kind in kinds] == [1, 0, 1, 1]
        assert total(found, "lmdeploy:gpu_cache_usage_perc") > 0
        answer.close()
        first.close()
        assert second.getresponse().status == 200
        assert total(samples(server), "lmdeploy:num_requests_failed") == 1


def test_lmdeploys_latencies_begin_with_a_handle_as_in_a_replay(twin: Callable[..., Behind]) -> None:
    behind = twin(SLOW, policy="lmdeploy-bd32,max_batch=2,block_length=4,num_pages=64,page_size=8", replicas=2)
    with serving(behind) as server:
        with ThreadPoolExecutor(12) as pool:
            for reply in pool.map(lambda n: server.complete(prompt=[0] * 4, max_tokens=n), range(20, 44, 2)):
                assert reply.status == 200
        found = samples(server)
    table = behind.columns()
    handed = handles_of(table["arrival"], table["finish"], table["replica"], 2)
    assert (handed > table["arrival"]).sum() >= 4
    for name, column in (("time_to_first_token_seconds", "first_emission"), ("e2e_request_latency_seconds", "finish")):
        assert total(found, f"lmdeploy:{name}_sum") == pytest.approx((table[column] - handed).sum()), name


def test_a_cancelled_request_frees_its_handle() -> None:
    watched = Handles(2)
    assert [watched.take(0.0), watched.take(0.5)] == [0.0, 0.5]
    watched.free(3.0)
    assert watched.take(1.0) == 3.0
    watched.free(4.0)
    watched.free(5.0)
    assert [watched.take(4.5), watched.take(4.6)] == [4.5, 5.0]


def test_openmetrics_is_given_to_clients_that_ask_for_it(twin: Callable[..., Behind]) -> None:
    with serving(twin()) as server:
        reply = server.ask(
            "GET", "/metrics", accept="application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"
        )
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert "vllm:prompt_tokens" in {family.name for family in openmetrics(reply.body.decode())}


def test_a_faster_clock_changes_no_time_of_the_twin(twin: Callable[..., Behind]) -> None:
    found = {}
    for speed in (1.0, 20.0):
        behind = twin(FAST, speed=speed)
        with serving(behind) as server:
            reply = server.complete(prompt=[1] * 5, max_tokens=40)
        table = behind.columns()
        found[speed] = float(table["finish"][0] - table["scheduled"][0])
        assert reply.headers["x-dsim"] == (
            "twin; the text is filler" if speed == 1 else
            "twin; the text is filler; times are simulated, 20 times as fast as the clock"
        )  # fmt: skip
    assert found[20.0] == pytest.approx(found[1.0], rel=1e-9)


# What the panels of vLLM's dashboard `prometheus_grafana` ask for (at commit 4b5c627).
DASHBOARD = """
e2e_request_latency_seconds_bucket e2e_request_latency_seconds_count prompt_tokens_total generation_tokens_total
inter_token_latency_seconds_bucket inter_token_latency_seconds_sum num_requests_running num_requests_waiting
time_to_first_token_seconds_bucket time_to_first_token_seconds_sum kv_cache_usage_perc request_prompt_tokens_bucket
request_generation_tokens_bucket request_success_total request_queue_time_seconds_sum request_prefill_time_seconds_sum
request_decode_time_seconds_sum request_max_num_generation_tokens_sum
"""


def test_each_panel_of_vllms_dashboard_has_its_metric_before_any_request(twin: Callable[..., Behind]) -> None:
    with serving(twin()) as server:
        found = samples(server)
    for name in DASHBOARD.split():
        assert all("model_name" in dict(labels) for labels in found[f"vllm:{name}"]), name


def test_a_value_on_an_edge_lies_below_it() -> None:
    buckets = Buckets((0.5, 1.0))
    for value in (0.25, 0.5, 0.75, 1.0, 2.0):
        buckets.add(value)
    assert (buckets.cumulative, buckets.sum) == ([2, 4, 5], 4.5)
