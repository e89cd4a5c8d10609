"""Record what a plain server of each release shows on /metrics, in data/*-plain.json.

    python tests/serve/plain_pages.py vllm|sglang|lmdeploy FOLDER

FOLDER holds the unpacked wheel. The release's own metrics code runs: its loggers and middlewares are made with the
defaults of a server without options, and observe what they observe for a diffusion model's requests. What they import
and do not need is replaced; vLLM's runs whole, in an environment of its CPU build with the Python of FOLDER before it.
"""

import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Has
from typing import Any
from unittest.mock import MagicMock

CONTEXT = 32768  # tokens, as the toy profile of the tests has
LABELS: dict[str, Any] = {"model_name": "m", "engine_type": "unified"}


def vllm(_folder: str) -> list[str]:
    """`vllm serve` of a diffusion model, with one request to a route and one elsewhere."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.config.cache import CacheConfig
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    app, cache = FastAPI(), CacheConfig()
    app.get("/v1/models")(lambda: {})
    attach_router(app)
    config = MagicMock(
        observability_config=Has(show_hidden_metrics=False, kv_cache_metrics=False, custom_histogram_buckets=None),
        model_config=Has(served_model_name="m", max_model_len=CONTEXT, is_diffusion=True), speculative_config=None,
        kv_transfer_config=None, ec_transfer_config=None, watermark_config=None, lora_config=None, cache_config=cache,
    )  # fmt: skip
    PrometheusStatLogger(config, [0]).log_engine_initialized()
    client = TestClient(app)
    start = client.get("/metrics").text
    for path in ("/v1/models", "/nothing"):
        client.get(path)
    return [start, client.get("/metrics").text]


def lmdeploy(folder: str) -> list[str]:
    """`lmdeploy serve api_server`: nothing comes with a request that is not there before."""
    from prometheus_client import REGISTRY, generate_latest

    package("lmdeploy", folder)
    for name in ("lmdeploy.metrics.stats", "lmdeploy.utils", "lmdeploy.messages"):
        sys.modules[name] = MagicMock()
    sys.modules["lmdeploy.messages"].ResponseType = ["SUCCESS", "FINISH"]  # type: ignore[attr-defined]
    importlib.import_module("lmdeploy.metrics.loggers").PrometheusStatLogger("m", CONTEXT, 0)
    return [generate_latest(REGISTRY).decode()] * 2


def sglang(folder: str) -> list[str]:
    """`sglang serve --enable-metrics` with a radix cache: its processes' series in one folder."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()
    for name in ("", ".srt", ".srt.observability", ".srt.utils"):
        package(f"sglang{name}", folder)
    for name in ("disaggregation", "disaggregation.utils", "model_executor.forward_batch_info", "server_args",
                 "utils.nvtx_utils", "runtime_context"):  # fmt: skip
        sys.modules[f"sglang.srt.{name}"] = MagicMock()
    package("sglang.srt.model_executor", folder)
    sys.modules["sglang.srt.utils"].get_bool_env_var = lambda *names: False  # type: ignore[attr-defined]
    context: Any = sys.modules["sglang.srt.runtime_context"]
    context.exports_expert_balancedness_to_prometheus = lambda: False
    context.get_observability = lambda: Has(prompt_tokens_buckets=None, generation_tokens_buckets=None)
    context.get_schedule = lambda: Has(
        prefill_delayer_max_delay_passes=30, prefill_delayer_forward_passes_buckets=None,
        prefill_delayer_wait_seconds_buckets=None,
    )  # fmt: skip
    srt = "sglang.srt.observability."
    made, http, timer, cpu = (
        importlib.import_module(srt + name)
        for name in ("metrics_collector", "http_request_metrics", "func_timer", "cpu_monitor")
    )
    graphs = importlib.import_module("sglang.srt.model_executor.graph_memory_usage").empty_graph_memory_usage()
    scheduler = made.SchedulerMetricsCollector(
        labels={**LABELS, "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}, server_args=None
    )
    scheduler.log_stats(made.SchedulerStats())
    scheduler.emit_constants(1, None, 1.0, 1.0, graphs, None, 1, 1, CONTEXT, 1.0)
    tokenizer = made.TokenizerMetricsCollector(labels=LABELS)
    phases = ("load_weight", "kv_cache_allocation", "scheduler_e2e", "tokenizer_e2e")
    tokenizer.emit_startup_time({**dict.fromkeys(phases, 1.0), "cuda_graph": graphs})
    cache = made.RadixCacheMetricsCollector(
        labels={"cache_type": "UnifiedRadixCache", "tp_rank": 0, "pp_rank": 0, "dp_rank": 0}
    )
    timer.enable_func_timer()
    http.init_http_request_metrics()
    counts = http._http_request_metrics  # a request for the page is counted before its answer is made
    counts.requests_total.labels(endpoint="/metrics", method="GET").inc()
    counts.requests_active.labels(endpoint="/metrics", method="GET").inc()
    cpu.start_cpu_monitor_thread("tokenizer", 0.05)
    time.sleep(0.5)
    start = processes()
    scheduler.observe_per_stage_req_latency("request_process", 0.0)
    scheduler.observe_queue_time(0.0)
    scheduler.increment_prefill_cuda_graph_pass(True)
    scheduler.increment_realtime_tokens(None, 1, 1, 0)
    scheduler.increment_effective_prefill_tokens(1, 1, 0, 0)
    scheduler.increment_forward_execution_seconds("dllm_extend", 1.0)
    cache.observe_eviction_duration(0.0)
    cache.increment_eviction_num_tokens(1)
    tokenizer.observe_one_finished_request(LABELS, 1, 1, 1, 1.0, False, {"device": 1}, 0, True, 0.1)
    tokenizer.observe_time_to_first_token(LABELS, 0.1, stream=True)
    tokenizer.observe_inter_token_latency(LABELS, 0.1, 1)
    tokenizer.observe_one_aborted_request(LABELS)
    counts.responses_total.labels(endpoint="/metrics", status_code="200", method="GET").inc()
    return [start, processes()]


def processes() -> str:
    """The page of all processes that wrote into PROMETHEUS_MULTIPROC_DIR."""
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return generate_latest(registry).decode()


def package(name: str, folder: str) -> None:
    """A package whose modules are found, and whose __init__ does not run."""
    found = sys.modules[name] = ModuleType(name)
    found.__path__ = [str(Path(folder, *name.split(".")))]


def families(page: str) -> dict[str, dict[str, Any]]:
    """By name: type, labels, and a histogram's edges."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, Any]] = {}
    for family in text_string_to_metric_families(page):
        labels = {name for sample in family.samples for name in sample.labels}
        found[family.name] = {"type": family.type, "labels": sorted(labels)}
        if family.type == "histogram":
            edges = {sample.labels["le"] for sample in family.samples if "le" in sample.labels}
            found[family.name]["edges"] = sorted(edges, key=float)
    return found


def main(engine: str, folder: str) -> None:
    """Write the record of one release."""
    start, served = {"vllm": vllm, "sglang": sglang, "lmdeploy": lmdeploy}[engine](folder)
    first, found = families(start), families(served)
    lines = [
        f"  {json.dumps(name)}: {json.dumps({**family, 'from_start': name in first})}"
        for name, family in sorted(found.items())
    ]
    path = Path(__file__).parent / "data" / f"{engine}-plain.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{path}: {len(lines)} metrics")


if __name__ == "__main__":
    main(*sys.argv[1:])
