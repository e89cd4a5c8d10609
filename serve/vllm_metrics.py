"""Metrics of vLLM 0.33.0 that this server has; tests/serve/test_metrics.py compares them with the release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .metric import Face, Metric, Shown, counter, gauge, histogram, no_labels

if TYPE_CHECKING:
    from .fleet import Fleet
    from .replica import Replica

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0)  # fmt: skip
GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
         1920.0, 7680.0)  # fmt: skip
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


HTTP_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0,
                30.0, 60.0)  # fmt: skip
TIERS = ("device", "host", "p2p", "disk", "external_unspecified")

# Labels of cache_config_info; the release's defaults, but for those that _cache_config sets.
SETTINGS = {
    "_block_size_resolved": "True", "block_size": "", "cache_dtype": "auto", "cache_hit_alignment_tokens": "",
    "effective_attention_block_size": "", "enable_mamba_shared_prefix_checkpoint": "False",
    "enable_prefix_caching": "", "gpu_memory_utilization": "0.92", "hash_block_size": "",
    "is_attention_free": "False", "kv_cache_dtype_skip_layers": "[]", "kv_cache_layout": "None",
    "kv_cache_max_concurrency": "", "kv_cache_memory_bytes": "None", "kv_cache_size_tokens": "",
    "kv_offloading_backend": "native", "kv_offloading_size": "None", "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None", "mamba_cache_dtype": "auto", "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None", "mamba_ssm_cache_dtype": "auto", "num_cpu_blocks": "None", "num_gpu_blocks": "",
    "num_gpu_blocks_override": "None", "prefix_cache_retention_interval": "0", "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None", "replayssm_buffer_len": "16", "simple_cpu_offload_num_blocks": "None",
    "skip_page_size_padded": "None", "sliding_window": "None", "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False", "use_replayssm": "False", "user_specified_block_size": "False",
}  # fmt: skip


def _cache_config(fleet: Fleet, replica: Replica) -> Shown:
    memory, limits = replica.engine.policy.memory, replica.engine.limits
    page = str(memory.page_size)
    known = {
        "block_size": page, "hash_block_size": page, "effective_attention_block_size": page,
        "cache_hit_alignment_tokens": page, "num_gpu_blocks": str(limits.num_pages),
        "kv_cache_size_tokens": str(memory.page_size * limits.num_pages),
        "kv_cache_max_concurrency": str(limits.num_pages / -(-limits.context_limit // memory.page_size)),
        "enable_prefix_caching": str(getattr(memory, "prefix_caching", False)),
        "prefix_cache_retention_interval": str(getattr(memory, "prefix_cache_retention_interval", 0)),
    }  # fmt: skip
    return {tuple((SETTINGS | known).values()): 1.0}


METRICS = (
    gauge("vllm:num_requests_running", lambda fleet, r: r.engine.num_running, "Requests that hold pages."),
    gauge("vllm:num_requests_waiting", lambda fleet, r: r.num_queued, "Requests that wait."),
    gauge(
        "vllm:num_requests_waiting_by_reason",
        lambda fleet, r: {("capacity",): r.num_queued, ("deferred",): 0}, "Requests that wait, by reason.",
        ("reason",),
    ),
    gauge(
        "vllm:engine_sleep_state",
        lambda fleet, r: {("awake",): 1, ("weights_offloaded",): 0, ("discard_all",): 0}, "Whether the engine sleeps.",
        ("sleep_state",),
    ),
    gauge(
        "vllm:kv_cache_usage_perc", lambda fleet, r: r.engine.pages_held / r.engine.limits.num_pages,
        "Share of KV pages held, 0 to 1.",
    ),
    Metric(
        "vllm:cache_config_info", "gauge", _cache_config, "Settings of the KV cache.", tuple(SETTINGS), scope="bare"
    ),
    counter("vllm:prefix_cache_queries", lambda fleet, r: r.engine.totals.prefix_queries, "Prompt tokens looked up."),
    counter("vllm:prefix_cache_hits", lambda fleet, r: r.engine.totals.prefix_hits, "Prompt tokens found."),
    counter("vllm:external_prefix_cache_queries", lambda fleet, r: 0, "Tokens looked up in other instances: none."),
    counter("vllm:external_prefix_cache_hits", lambda fleet, r: 0, "Tokens found in other instances: none."),
    counter("vllm:mm_cache_queries", lambda fleet, r: 0, "Images and sounds looked up: none."),
    counter("vllm:mm_cache_hits", lambda fleet, r: 0, "Images and sounds found: none."),
    counter("vllm:num_preemptions", lambda fleet, r: r.engine.totals.preemptions, "Requests that lost their pages."),
    counter("vllm:prompt_tokens", "prompt_tokens", "Tokens of prompts, counted at a request's first output."),
    counter(
        "vllm:prompt_tokens_by_source", "prompt_tokens_by_source", "Tokens of prompts, by source.", ("source",),
        (("local_compute",), ("local_cache_hit",), ("external_kv_transfer",)),
    ),
    counter("vllm:prompt_tokens_cached", "cached_tokens", "Tokens of prompts found in the cache."),
    counter(
        "vllm:prompt_tokens_cached_by_source",
        lambda fleet, r: {(tier,): r.engine.totals.prefix_hits if tier == "device" else 0 for tier in TIERS},
        "Tokens of prompts found in the cache, by tier.", ("source",),
    ),
    counter("vllm:generation_tokens", "generation_tokens", "Tokens returned."),
    counter(
        "vllm:request_success", "finished", "Requests that were served, by the reason of their end.",
        ("finished_reason",), (("stop",), ("length",), ("abort",), ("error",), ("repetition",)),
    ),
    Metric(
        "vllm:admission_rejections", "counter",
        lambda fleet, r: {
            ("max_num_queued_reqs",): 0 if r.engine.replica else fleet.num_refused, ("max_num_queued_tokens",): 0
        },
        "Requests that were refused because too many waited.", ("reason",), scope="server",
    ),
    *(
        counter(f"vllm:estimated_{what}_per_gpu_total", lambda fleet, r: 0, f"Estimated {what}: none are counted.")
        for what in ("flops", "read_bytes", "write_bytes")
    ),
    histogram("vllm:request_prompt_tokens", "input_length", "Tokens of a prompt.", None),
    histogram("vllm:request_generation_tokens", "output_length", "Tokens of a reply.", None),
    histogram("vllm:iteration_tokens_total", "iteration_tokens", "Tokens of a step that returned some.", STEP_TOKENS),
    histogram("vllm:request_max_num_generation_tokens", "output_length", "Tokens of the longest reply.", None),
    histogram("vllm:request_params_n", "num_replies", "Replies that a request asks for.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    histogram("vllm:request_params_max_tokens", "max_tokens", "Tokens that a request asks for.", None),
    histogram("vllm:time_to_first_token_seconds", "ttft", "From arrival to the first tokens.", TTFT),
    histogram("vllm:inter_token_latency_seconds", "gap", "From one output of a request to the next.", GAP),
    histogram("vllm:request_time_per_output_token_seconds", "tpot", "A token's share of the decode time.", GAP),
    histogram("vllm:e2e_request_latency_seconds", "e2el", "From arrival to the last tokens.", WHOLE),
    histogram("vllm:request_queue_time_seconds", "queue_time", "From the engine's queue to the first step.", WHOLE),
    histogram("vllm:request_inference_time_seconds", "inference", "From the first step to the last tokens.", WHOLE),
    histogram("vllm:request_prefill_time_seconds", "prefill", "From the first step to the first tokens.", WHOLE),
    histogram("vllm:request_decode_time_seconds", "decode", "From the first tokens to the last.", WHOLE),
    histogram(
        "vllm:request_num_preemptions", "num_preemptions", "How often a request lost its pages.",
        (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
    ),
    histogram("vllm:request_prefill_kv_computed_tokens", "computed_tokens", "Tokens of a prompt not cached.", None),
    Metric(
        "http_requests", "counter", "http_requests", "Requests over HTTP that were answered.",
        ("method", "status", "handler"), scope="process",
    ),
    Metric(
        "http_request_size_bytes", "summary", "http_request_bytes", "Their content-length (bytes).", ("handler",), (),
        "process",
    ),
    Metric(
        "http_response_size_bytes", "summary", "http_response_bytes", "The content-length of their answers (bytes).",
        ("handler",), (), "process",
    ),
    Metric(
        "http_request_duration_highr_seconds", "histogram", "http_seconds", "From a request to its answer's end (s).",
        (), HTTP_SECONDS, "process", ((),),
    ),
    Metric(
        "http_request_duration_seconds", "histogram", "http_seconds", "... in few buckets.", ("method", "handler"),
        (0.1, 0.5, 1.0), "process",
    ),
    Metric(
        "vllm:diffusion_num_denoising_steps", "counter", lambda fleet, r: r.engine.totals.forwards,
        "Rows of denoising steps.", only="masks",
    ),
    Metric(
        "vllm:diffusion_num_canvas_positions", "counter", lambda fleet, r: r.engine.totals.tokens,
        "Positions that denoising steps computed.", only="masks",
    ),
    Metric(
        "vllm:diffusion_num_committed_tokens", "counter", lambda fleet, r: r.engine.totals.committed,
        "Positions that denoising steps committed.", only="masks",
    ),
)  # fmt: skip


def _settings(fleet: Fleet, model: str) -> dict[str, Any]:
    engine = fleet.engines[0]
    memory, limits = engine.policy.memory, engine.limits
    config = {
        "model_config": {"served_model_name": model, "max_model_len": limits.context_limit},
        "cache_config": {
            "block_size": memory.page_size, "num_gpu_blocks": limits.num_pages,
            "enable_prefix_caching": getattr(memory, "prefix_caching", False),
        },
        "scheduler_config": {
            "max_num_seqs": limits.max_batch,
            "max_num_batched_tokens": limits.max_prefill_tokens or engine.policy.batching.max_prefill_tokens,
        },
        "parallel_config": {"data_parallel_size": len(fleet.engines)},
    }  # fmt: skip
    return {"vllm_config": config}


VLLM = Face(
    "vllm", "vLLM 0.33.0", METRICS,
    {
        "engine": lambda model, index, count: {"model_name": model, "engine": str(index)},
        "server": lambda model, index, count: {"model_name": model},
        "bare": lambda model, index, count: {"engine": str(index)},
        "process": no_labels,
    },
    _settings, dated=True,
)  # fmt: skip
