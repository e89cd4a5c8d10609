"""Metrics of SGLang 0.5.23 that this server has; tests/serve/test_metrics.py compares them with the release.

The release counts a diffusion model's batches as prefill, and so does this table: `gen_throughput` stays 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .metric import Face, Metric, Shown, counter, gauge, histogram, no_labels

if TYPE_CHECKING:
    from .fleet import Fleet
    from .replica import Replica

LENGTHS = (100.0, 300.0, 500.0, 700.0, 1000.0, 1500.0, *(1000.0 * n for n in range(2, 11)),
           *(2500.0 * n for n in range(5, 13)), 35_000.0, 40_000.0, 60_000.0, 80_000.0, 100_000.0, 200_000.0, 300_000.0,
           400_000.0, 600_000.0, 800_000.0, 1_000_000.0, 1_100_000.0)  # fmt: skip
TTFT = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0)
E2EL = (*TTFT, 600.0, 1200.0, 1800.0, 2400.0)
PACE = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8,
        1.0, 2.0, 4.0, 6.0, 8.0)  # fmt: skip
QUEUE = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0,
         *(10.0 * n for n in range(3, 11)), *(100.0 * n for n in range(2, 11)), 1200.0, 1400.0, 1600.0, 1800.0, 2000.0,
         2500.0, 3000.0)  # fmt: skip
STAGES = (
    "other", "recv_requests", "process_input_requests", "get_next_batch_to_run", "process_queue", "run_batch",
    "process_batch_result", "sanity_check_cache", "idle",
)  # fmt: skip
STREAMED = ("is_streaming",)
REQUEST_STAGES = tuple(0.001 * 1.62**i for i in range(30))
EVICTIONS = (*(n / 1000 for n in range(1, 10)), 0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.2, 0.5, 1.0)
KEY_COUNTS = (0, 1, 2, 3, 5, 7, 10, 20, 50, 100, 200)
PHASES = ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend")  # of captured graphs
SYNC_WAITS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
IMBALANCES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0)
GB = 1 << 30  # bytes, as the release divides


def _of_server(metric: Metric) -> Metric:
    """Of the tokenizer process, which all engines share."""
    return replace(metric, scope="server")


def _once_counted(metric: Metric) -> Metric:
    """The release shows it from the first count on."""
    value = metric.value
    if isinstance(value, str):
        return replace(metric, seeded=())

    def counted(fleet: Fleet, replica: Replica) -> Shown:
        shown = value(fleet, replica)
        return {(): shown} if shown and not isinstance(shown, Mapping) else {}

    return replace(metric, value=counted)


def _size(replica: Replica) -> int:
    return replica.engine.limits.num_pages * replica.engine.policy.memory.page_size


def _held(replica: Replica) -> int:
    return replica.engine.pages_held * replica.engine.policy.memory.page_size


def _idle(replica: Replica) -> int:
    return replica.engine.idle_pages * replica.engine.policy.memory.page_size


def _always(value: float) -> Callable[[Fleet, Replica], Shown]:
    return lambda fleet, replica: value


def _none_of(*names: str) -> Callable[[Fleet, Replica], Shown]:
    """0 for each value of a label."""
    return lambda fleet, replica: {(name,): 0 for name in names}


def _idle_keys(fleet: Fleet, replica: Replica) -> Shown:
    ends = [*map(str, KEY_COUNTS), "+Inf"]
    return dict.fromkeys(pairwise(ends), 0)


def _this_process(value: float) -> Callable[[Fleet, Replica], Shown]:
    return lambda fleet, replica: {(str(os.getpid()),): value}


def _weights(fleet: Fleet, replica: Replica) -> float:
    return 0.0 if fleet.memory is None else fleet.memory.weight_bytes / GB


def _pool(fleet: Fleet, replica: Replica) -> float:
    return 0.0 if fleet.memory is None else _size(replica) * fleet.memory.kv_bytes_per_token / GB


def _left(fleet: Fleet, replica: Replica) -> float:
    if fleet.memory is None:
        return 0.0
    return max(0.0, fleet.memory.capacity_bytes / GB - _weights(fleet, replica) - _pool(fleet, replica))


def _process_seconds(fleet: Fleet, replica: Replica) -> Shown:
    return {("tokenizer",): 0.0 if replica.engine.replica else time.process_time(), ("detokenizer",): 0}


def _evicted(fleet: Fleet, replica: Replica) -> float:
    return replica.engine.evicted_pages * replica.engine.policy.memory.page_size


# Gauges that the release sets to 0 in a server without the feature.
ZEROS = {
    "num_grammar_queue_reqs": "Requests that wait for a grammar",
    "num_unique_running_routing_keys": "Routing keys of running requests", "utilization": "Not measured",
    "swa_token_usage": "Share of the pool of layers with a window", "swa_available_tokens": "... free tokens",
    "swa_evictable_tokens": "... tokens kept for reuse", "swa_used_tokens": "... tokens held",
    "mamba_usage": "Share of the pool of states", "mamba_available_tokens": "... free states",
    "mamba_evictable_tokens": "... states kept for reuse", "mamba_used_tokens": "... states held",
    "spec_accept_length": "Speculative decoding: accepted length", "spec_accept_rate": "... accepted share",
    "spec_cap_length": "... length of its cap", "spec_block_accept_length": "... accepted length without a cap",
    "spec_num_steps": "... steps", "spec_num_draft_tokens": "... draft tokens",
    "num_prefill_bootstrap_queue_reqs": "Split prefill: requests that wait for a link",
    "num_prefill_inflight_queue_reqs": "... that are being sent", "num_decode_prealloc_queue_reqs": "... for pages",
    "num_decode_transfer_queue_reqs": "... that are being received",
    "num_decode_host_receive_queue_reqs": "... that the host receives",
    "num_decode_deferred_kv_release_reqs": "... failed ones that hold pages",
    "pending_prealloc_token_usage": "... share of tokens that wait for pages",
    "prealloc_full_token_usage": "... share of tokens with pages", "prealloc_swa_token_usage": "... with a window",
}  # fmt: skip

METRICS = (
    *(gauge(f"sglang:{name}", lambda fleet, r: 0, f"{about}; 0 in this server.") for name, about in ZEROS.items()),
    # A diffusion model takes no decode steps, which alone change these.
    *(
        Metric(f"sglang:{name}", "gauge", _always(value), about, only="masks")
        for name, value, about in (
            ("decode_sum_seq_lens", 0.0, "Lengths of the sequences of the last decode step."),
            ("new_token_ratio", 0.7, "Share of a request's tokens for which pages are kept, as it starts."),
        )
    ),
    Metric(
        "sglang:num_retracted_reqs", "gauge", _this_process(0), "Requests that the last decode step retracted.",
        ("pid",), only="masks",
    ),
    gauge("sglang:num_paused_reqs", _this_process(0), "Requests paused for new weights; 0 in this server.", ("pid",)),
    *(
        gauge(f"sglang:routing_key_{which}_req_count", _idle_keys, f"Routing keys by {which} requests: none.",
              ("gt", "le"))
        for which in ("running", "all")
    ),
    *(
        counter(f"sglang:dp_attention_{what}_total", _none_of(*values), f"Attention over replicas: {what}; 0 here.",
                (label,))
        for what, label, values in (
            ("tokens", "kind", ("scheduled", "imbalance")), ("pairs", "kind", ("scheduled", "imbalance")),
            ("steps", "rank_state", ("active", "idle")),
        )
    ),
    histogram("sglang:dp_attention_sync_wait_seconds", "none", "... waits; never observed here.", SYNC_WAITS),
    histogram("sglang:dp_attention_token_imbalance_ratio", "none", "... imbalance; never observed here.", IMBALANCES),
    gauge("sglang:weight_memory_usage_gb", _weights, "Weights on a GPU (GiB); 0 with --model."),
    gauge("sglang:kv_cache_memory_usage_gb", _pool, "The KV pool on a GPU (GiB); 0 with --model."),
    gauge("sglang:startup_available_gpu_memory_gb", _left, "A GPU's memory without these (GiB); 0 with --model."),
    gauge("sglang:graph_memory_usage_gb", _none_of(*PHASES), "Captured graphs (GiB): 0, not known.", ("phase",)),
    *map(_of_server, (
        gauge(
            "sglang:startup_time_seconds",
            _none_of("load_weight", "kv_cache_allocation", "scheduler_e2e", "tokenizer_e2e"),
            "The start's phases (s): 0, not known.", ("phase",),
        ),
        gauge(
            "sglang:startup_cuda_graph_time_seconds", _none_of(*PHASES), "... of capturing graphs: 0, not known.",
            ("phase",),
        ),
    )),
    gauge("sglang:num_running_reqs", lambda fleet, r: r.engine.num_running, "Requests that hold pages."),
    gauge("sglang:num_queue_reqs", lambda fleet, r: r.num_queued, "Requests that wait."),
    gauge("sglang:gen_throughput", lambda fleet, r: r.watch.throughput, "Tokens a second of the last decode steps."),
    gauge("sglang:cache_hit_rate", lambda fleet, r: r.watch.hit_rate, "Share of the last batch's tokens found cached."),
    gauge("sglang:token_usage", lambda fleet, r: round(_held(r) / _size(r), 2), "Share of KV tokens held, 0 to 1."),
    gauge("sglang:full_token_usage", lambda fleet, r: _held(r) / _size(r), "... of layers without a window."),
    gauge("sglang:num_used_tokens", lambda fleet, r: _held(r), "KV tokens held."),
    gauge("sglang:kv_used_tokens", lambda fleet, r: _held(r), "KV tokens held by running requests."),
    gauge("sglang:kv_evictable_tokens", lambda fleet, r: _idle(r), "KV tokens kept for reuse."),
    gauge("sglang:kv_available_tokens", lambda fleet, r: _size(r) - _held(r) - _idle(r), "KV tokens free."),
    gauge("sglang:fwd_occupancy", lambda fleet, r: r.watch.occupancy, "Percent of the time in forward passes."),
    gauge("sglang:is_cuda_graph", lambda fleet, r: r.watch.captured, "Whether the last batch ran as a graph."),
    gauge("sglang:max_total_num_tokens", lambda fleet, r: _size(r), "Tokens of the KV pool."),
    gauge("sglang:page_size", lambda fleet, r: r.engine.policy.memory.page_size, "Tokens of a KV page."),
    gauge("sglang:num_pages", lambda fleet, r: r.engine.limits.num_pages, "Pages of the KV pool."),
    gauge("sglang:context_len", lambda fleet, r: r.engine.limits.context_limit, "Longest sequence."),
    *map(_once_counted, (
        counter("sglang:num_retracted_requests_total", "retracted", "Requests that lost their pages."),
        counter("sglang:num_retracted_input_tokens_total", "retracted_input", "... tokens of their prompts."),
        counter("sglang:num_retracted_output_tokens_total", "retracted_output", "... tokens of their replies."),
        Metric("sglang:evicted_tokens_total", "counter", _evicted, "KV tokens evicted for others.", scope="cache"),
        Metric(
            "sglang:eviction_duration_seconds", "histogram", "eviction", "A step's evictions (s), which take no time.",
            (), EVICTIONS, "cache",
        ),
        histogram("sglang:queue_time_seconds", "queue_time_at_start", "From the queue to the first step.", QUEUE),
    )),
    histogram(
        "sglang:per_stage_req_latency_seconds", "stage", "A request's time in a stage (s).", REQUEST_STAGES, ("stage",)
    ),
    counter("sglang:cuda_graph_passes_total", "passes", "Batches, by stage and by graph.", ("mode",)),
    counter(
        "sglang:realtime_tokens_total", "realtime_tokens", "Tokens that batches computed or found cached.", ("mode",)
    ),
    counter(
        "sglang:prefill_effective_tokens_total", "effective_tokens", "Tokens of prefill batches, by source.", ("mode",),
        (("input",), ("device_hit",), ("host_hit",), ("storage_hit",)),
    ),
    counter(
        "sglang:forward_execution_seconds_total", "forward_seconds", "Time in forward passes.", ("category",)
    ),
    counter("sglang:scheduler_idle_seconds_total", lambda fleet, r: r.watch.idle, "Time without requests."),
    counter(
        "sglang:scheduler_process_cpu_seconds_total", lambda fleet, r: r.watch.cpu,
        "The processor's time in the replica's thread (real s).",
    ),
    counter(
        "sglang:scheduler_stage_seconds_total",
        lambda fleet, r: {(stage, "none"): r.watch.stages.get(stage, 0.0) for stage in STAGES},
        "The scheduler's time: forwards (run_batch), the host's own (other), idle.", ("category", "forward_overlap"),
    ),
    *map(_of_server, map(_once_counted, (
        counter("sglang:prompt_tokens_total", "input_length", "Tokens of finished requests' prompts.", STREAMED),
        counter("sglang:generation_tokens_total", "output_length", "Tokens of finished requests' replies.", STREAMED),
        histogram("sglang:prompt_tokens_histogram", "input_length", "Tokens of a prompt.", LENGTHS),
        histogram("sglang:uncached_prompt_tokens_histogram", "computed_tokens", "... not found cached.", LENGTHS),
        histogram("sglang:generation_tokens_histogram", "output_length", "Tokens of a reply.", LENGTHS),
        counter("sglang:cached_tokens_total", "cached_by_source", "Prompt tokens found cached.", ("cache_source",)),
        counter("sglang:num_requests_total", "num_replies", "Requests that were served.", STREAMED),
        counter("sglang:num_aborted_requests_total", lambda fleet, r: r.watch.num_cancelled, "Requests cancelled."),
        histogram("sglang:time_to_first_token_seconds", "ttft", "From arrival to the first tokens.", TTFT, STREAMED),
        histogram("sglang:inter_token_latency_seconds", "gap_of_each_token", "A token's share of a gap.", PACE),
        histogram(
            "sglang:request_time_per_output_token_seconds", "tpot", "A token's share of the decode time.", PACE,
            STREAMED,
        ),
        histogram("sglang:e2e_request_latency_seconds", "e2el", "From arrival to the last tokens.", E2EL, STREAMED),
    ))),
    *(replace(metric, scope="process") for metric in (
        counter("sglang:process_cpu_seconds_total", _process_seconds, "Processor time (real s).", ("component",)),
        counter("sglang:http_requests_total", "http_begun", "Requests over HTTP.", ("endpoint", "method")),
        counter("sglang:http_responses_total", "http_answered", "Answers.", ("endpoint", "status_code", "method")),
        Metric("sglang:http_requests_active", "gauge", "http_active", "... at work.", ("endpoint", "method")),
        gauge("sglang:routing_keys_active", _always(0), "Routing keys of requests: none."),
    )),
)  # fmt: skip


def _engine(model: str, index: int, count: int) -> dict[str, str]:
    ranks = {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"} | ({"dp_rank": str(index)} if count > 1 else {})
    return _server(model, index, count) | ranks


def _server(model: str, index: int, count: int) -> dict[str, str]:
    return {"model_name": model, "engine_type": "unified"}


def _cache(model: str, index: int, count: int) -> dict[str, str]:
    return {"cache_type": "UnifiedRadixCache", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}


def _settings(fleet: Fleet, model: str) -> dict[str, Any]:
    engine = fleet.engines[0]
    memory, limits = engine.policy.memory, engine.limits
    tokens = limits.num_pages * memory.page_size
    states = [{"effective_max_running_requests_per_dp": limits.max_batch, "last_gen_throughput": r.watch.throughput}
              for r in fleet.replicas]  # fmt: skip
    return {
        "served_model_name": model, "page_size": memory.page_size, "context_length": limits.context_limit,
        "max_running_requests": limits.max_batch, "max_total_num_tokens": tokens,
        "chunked_prefill_size": limits.max_prefill_tokens or engine.policy.batching.max_prefill_tokens,
        "dp_size": len(fleet.engines), "disable_radix_cache": not getattr(memory, "prefix_caching", False),
        "internal_states": states, "version": "0.5.23",
    }  # fmt: skip


SGLANG = Face(
    "sglang", "SGLang 0.5.23", METRICS,
    {"engine": _engine, "server": _server, "cache": _cache, "process": no_labels}, _settings, one_process=False,
)  # fmt: skip
