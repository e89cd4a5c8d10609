"""Metrics of SGLang 0.5.23 that this server has; tests/serve/test_metrics.py compares them with the release.

The release counts a diffusion model's batches as prefill, and so does this table: `gen_throughput` stays 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .metric import Face, Metric, Shown, counter, gauge, histogram

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


def _of_server(metric: Metric) -> Metric:
    """Of the tokenizer process, which all engines share."""
    return Metric(
        metric.name, metric.kind, metric.value, metric.about, metric.labels, metric.edges, "server", metric.seeded
    )


def _size(replica: Replica) -> int:
    return replica.engine.limits.num_pages * replica.engine.policy.memory.page_size


def _held(replica: Replica) -> int:
    return replica.engine.pages_held * replica.engine.policy.memory.page_size


def _idle(replica: Replica) -> int:
    return replica.engine.idle_pages * replica.engine.policy.memory.page_size


def _always(value: float) -> Callable[[Fleet, Replica], Shown]:
    return lambda fleet, replica: value


# Gauges that the release sets to 0 in a server without the feature.
ZEROS = {
    "num_grammar_queue_reqs": "Requests that wait for a grammar", "num_paused_reqs": "Requests paused for new weights",
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
            ("num_retracted_reqs", 0.0, "Requests that the last decode step retracted."),
        )
    ),
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
    counter(
        "sglang:num_retracted_requests_total", lambda fleet, r: r.engine.totals.preemptions,
        "Requests that lost their pages.",
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
        "sglang:scheduler_stage_seconds_total",
        lambda fleet, r: {(stage, "none"): r.watch.stages.get(stage, 0.0) for stage in STAGES},
        "The scheduler's time: forwards (run_batch), the host's own (other), idle.", ("category", "forward_overlap"),
    ),
    histogram("sglang:queue_time_seconds", "queue_time_at_start", "From the queue to the first step.", QUEUE),
    *map(_of_server, (
        counter("sglang:prompt_tokens_total", "input_length", "Tokens of finished requests' prompts.", STREAMED),
        counter("sglang:generation_tokens_total", "output_length", "Tokens of finished requests' replies.", STREAMED),
        histogram("sglang:prompt_tokens_histogram", "input_length", "Tokens of a prompt.", LENGTHS),
        histogram("sglang:uncached_prompt_tokens_histogram", "computed_tokens", "... not found cached.", LENGTHS),
        histogram("sglang:generation_tokens_histogram", "output_length", "Tokens of a reply.", LENGTHS),
        counter("sglang:cached_tokens_total", "cached_by_source", "Prompt tokens found cached.", ("cache_source",)),
        counter("sglang:num_requests_total", "num_replies", "Requests that were served.", STREAMED),
        counter("sglang:num_so_requests_total", lambda fleet, r: 0, "Requests for structured output: none."),
        counter("sglang:num_aborted_requests_total", lambda fleet, r: r.watch.num_cancelled, "Requests cancelled."),
        histogram("sglang:time_to_first_token_seconds", "ttft", "From arrival to the first tokens.", TTFT, STREAMED),
        histogram("sglang:inter_token_latency_seconds", "gap_of_each_token", "A token's share of a gap.", PACE),
        histogram(
            "sglang:request_time_per_output_token_seconds", "tpot", "A token's share of the decode time.", PACE,
            STREAMED,
        ),
        histogram("sglang:e2e_request_latency_seconds", "e2el", "From arrival to the last tokens.", E2EL, STREAMED),
    )),
)  # fmt: skip


def _labels(model: str, index: int, count: int) -> dict[str, str]:
    ranks = {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"} | ({"dp_rank": str(index)} if count > 1 else {})
    return {"model_name": model, "engine_type": "unified", **ranks}


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


SGLANG = Face("sglang", "SGLang 0.5.23", METRICS, _labels, ("model_name", "engine_type"), _settings)
