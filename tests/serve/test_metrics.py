"""What /metrics shows: the names, types and buckets of the releases, and the journal's numbers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsim.results.engine_metrics import EDGES, QUANTITIES, RELEASES, engine_of
from dsim.serve.counts import Buckets

from ..checks import cases, refused
from .serving import CHUNK, FAST, Running, Twin, serving, until

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "serve-metrics.md"
SMALL = "block_length=4,num_pages=64"


@cases("engine", *RELEASES)
def test_names_types_and_buckets_are_the_releases(engine: str) -> None:
    record = json.loads((HERE / "data" / f"{engine}.json").read_text())
    released = {name.removesuffix("_total"): metric for name, metric in record["metrics"].items()}
    for quantity in QUANTITIES:
        if name := quantity.name_in(engine):
            theirs = released[name.removesuffix("_total")]
            assert quantity.kind == theirs["type"], name
            if quantity.kind == "histogram":
                edges = EDGES[engine].get(quantity.name, "1-2-5")
                expected = theirs["edges"] if theirs["edges"] == "1-2-5" else pytest.approx(theirs["edges"], rel=1e-12)
                assert edges == expected, name
    assert RELEASES[engine].split()[1] == record["version"]


def test_the_page_lists_every_quantity_by_its_names() -> None:
    page = PAGE.read_text()
    for quantity in QUANTITIES:
        for name in filter(None, (quantity.vllm, quantity.sglang, quantity.lmdeploy)):
            assert f"`{name}`" in page, name


def test_a_policy_shows_the_metrics_of_its_engine() -> None:
    policies = ("vllm-diffusion", "sglang-fdfo", "lmdeploy-bd32", "optimus", "ar")
    assert [engine_of(policy) for policy in policies] == ["vllm", "sglang", "lmdeploy", "vllm", "vllm"]
    with refused(r"^--metrics-as is sglan, expected one of vllm, sglang, lmdeploy$"):
        engine_of("optimus", "sglan")


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
    ("sglang", f"sglang-fdfo,max_running_requests=4,{SMALL}", "sglang:num_requests_total"),
    ("lmdeploy", f"lmdeploy-bd32,max_batch=4,page_size=8,{SMALL}", "lmdeploy:request_success_total"),
]


@cases("engine policy served", *LIVED)
def test_the_numbers_are_the_journals(twin: Twin, engine: str, policy: str, served: str) -> None:
    behind = twin(policy=policy, replicas=2)
    with serving(behind) as server:
        for i in range(6):
            assert server.complete(prompt=[0] * (1 + i), max_tokens=8 + i).status == 200
        found = samples(server)
        again = samples(server)
        Path("metrics").write_bytes(server.ask("GET", "/metrics").body)
    table, steps = behind.columns(), server.totals
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
            rows = table["replica"] == int(labels["dp_rank" if engine == "sglang" else "engine"])
            assert count == (seconds[rows] <= float(edge)).sum(), (name, given)
    if engine == "vllm":
        assert total(found, "vllm:diffusion_num_denoising_steps_total") == steps.forwards
        assert total(found, "vllm:diffusion_num_committed_tokens_total") == steps.committed
        assert total(found, "vllm:cache_config_info", block_size="8", num_gpu_blocks="64") == 2
        assert total(found, "vllm:inter_token_latency_seconds_count") == (table["num_emissions"].sum() - 6)
        assert total(found, "vllm:num_requests_running") == total(found, "vllm:num_requests_waiting") == 0
    if engine == "sglang":
        busy = total(found, "sglang:forward_execution_seconds_total")
        assert busy == pytest.approx(steps.prefill_time + steps.decode_time)
        assert total(found, "sglang:cuda_graph_passes_total") == steps.num_prefill_steps + steps.num_decode_steps
    assert total(found, "dsim_simulated") == 1
    assert total(found, "dsim_simulated_time_seconds") > 0


def test_a_request_that_waits_or_runs_or_goes_away_is_counted_so(twin: Twin) -> None:
    behind = twin(policy="lmdeploy-bd32,max_batch=1,block_length=4,num_pages=64,page_size=8", speed=0.1)
    with serving(behind, drain=0.1) as server:
        first = server.begin(prompt=[1], max_tokens=200, stream=True)
        answer = first.getresponse()
        assert answer.readline().startswith(b"data: ")
        second = server.begin(prompt=[1], max_tokens=4)
        until(lambda: behind.fleet.replicas[0].num_queued == 1)  # once the step in which it came is over
        found = samples(server)
        kinds = ("requests_running", "requests_waiting", "api_requests_waiting")
        assert [total(found, f"lmdeploy:num_{kind}") for kind in kinds] == [1, 1, 0]
        assert total(found, "lmdeploy:gpu_cache_usage_perc") > 0
        answer.close()
        first.close()
        assert second.getresponse().status == 200
        assert total(samples(server), "lmdeploy:request_success_total") == 1


def test_a_faster_clock_changes_no_time_of_the_twin(twin: Twin) -> None:
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


def test_each_panel_of_vllms_dashboard_has_its_metric_before_any_request(twin: Twin) -> None:
    with serving(twin()) as server:
        found = samples(server)
    for name in DASHBOARD.split():
        assert all("model_name" in dict(labels) for labels in found[f"vllm:{name}"]), name


def test_a_value_on_an_edge_lies_below_it() -> None:
    buckets = Buckets((0.5, 1.0))
    for value in (0.25, 0.5, 0.75, 1.0, 2.0):
        buckets.add(value)
    assert (buckets.cumulative, buckets.sum) == ([2, 4, 5], 4.5)
