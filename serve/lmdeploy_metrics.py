"""Metrics of LMDeploy 0.18.0 that this server has; tests/serve/test_metrics.py compares them with the release."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .metric import Face, Metric, Shown, counter, gauge, histogram, no_labels
from .vllm_metrics import GAP, STEP_TOKENS, TTFT, WHOLE

if TYPE_CHECKING:
    from .fleet import Fleet
    from .replica import Replica

PACE = (0.005, *GAP)
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

# Outcomes of a request, by the names of the release; a twin's requests finish.
OUTCOMES = tuple(
    (f"ResponseType.{name}",)
    for name in (
        "SUCCESS", "FINISH", "ENGINE_STOP_ERROR", "SESSION_REPEAT", "SESSION_NOT_EXIST", "HANDLER_NOT_EXIST",
        "INPUT_LENGTH_ERROR", "INTERNAL_ENGINE_ERROR", "CANCEL", "PREFIX_CACHE_CONFLICT", "NO_QUEUE", "NOT_SUPPORTED",
        "OUT_OF_MEMORY",
    )
)  # fmt: skip


def _routed(replica: Replica) -> int:
    return min(replica.engine.num_running + replica.num_queued, replica.engine.limits.max_batch)


def _none_yet(fleet: Fleet, replica: Replica) -> Shown:
    return {}


METRICS = (
    Metric(
        "lmdeploy:backend_config_info", "gauge", lambda fleet, r: 0 if r.engine.replica else 1,
        "Settings, which the release leaves empty.", scope="process",
    ),
    gauge("lmdeploy:num_requests_succeeded", lambda fleet, r: r.watch.num_done, "Requests that were served."),
    gauge("lmdeploy:num_requests_failed", lambda fleet, r: r.watch.num_cancelled, "Requests that were cancelled."),
    gauge("lmdeploy:num_requests_running", lambda fleet, r: r.engine.num_running, "Requests that hold pages."),
    gauge("lmdeploy:num_requests_waiting", lambda fleet, r: _routed(r) - r.engine.num_running, "Requests that wait."),
    gauge(
        "lmdeploy:num_api_requests_routed", lambda fleet, r: _routed(r),
        "Requests that have one of the engine's max_batch handles.",
    ),
    gauge(
        "lmdeploy:num_api_requests_waiting", lambda fleet, r: r.engine.num_running + r.num_queued - _routed(r),
        "Requests that wait for a handle.",
    ),
    *(
        counter(f"lmdeploy:spec_decode_num_{name}_total", lambda fleet, r: 0, f"Speculative decoding: {name}, none.")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    ),
    *(
        gauge(f"lmdeploy:spec_decode_mean_accept_{name}", lambda fleet, r: 0, f"Speculative decoding: mean {name}.")
        for name in ("rate", "length")
    ),
    counter(
        "lmdeploy:spec_decode_num_accepted_tokens_per_pos_total", _none_yet,
        "Speculative decoding: accepted_tokens by position, none.", ("position",),
    ),
    gauge(
        "lmdeploy:spec_decode_per_position_accept_rate", _none_yet,
        "Speculative decoding: accepted share by position, none.", ("position",),
    ),
    gauge(
        "lmdeploy:gpu_cache_usage_perc", lambda fleet, r: r.engine.pages_held / r.engine.limits.num_pages,
        "Share of KV pages held, 0 to 1.",
    ),
    gauge(
        "lmdeploy:prefix_cache_hit_rate",
        lambda fleet, r: (t := r.engine.totals).prefix_hits / max(1, t.prefix_queries),
        "Share of prompt tokens found in the cache, 0 to 1.",
    ),
    counter("lmdeploy:prompt_tokens_total", "prompt_tokens", "Tokens of prompts, counted at the first output."),
    counter("lmdeploy:generation_tokens_total", "generation_tokens", "Tokens returned."),
    counter("lmdeploy:cached_tokens_total", "cached_length", "Tokens of prompts found in the cache."),
    counter(
        "lmdeploy:request_success_total", "finished_type", "Requests that were served.", ("finished_reason",),
        OUTCOMES,
    ),
    histogram("lmdeploy:request_prompt_tokens", "input_length", "Tokens of a prompt.", None),
    histogram("lmdeploy:request_generation_tokens", "output_length", "Tokens of a reply.", None),
    histogram("lmdeploy:request_cached_tokens", "cached_length", "Tokens of a prompt found in the cache.", None),
    histogram("lmdeploy:request_cache_hit_ratio", "cached_share", "Share of a prompt found in the cache.", SHARES),
    histogram("lmdeploy:iteration_tokens_total", "output_tokens", "Tokens of one output of a request.", STEP_TOKENS),
    histogram("lmdeploy:time_to_first_token_seconds", "ttft", "From arrival to the first tokens.", TTFT),
    histogram("lmdeploy:time_per_output_token_seconds", "gap_per_token", "A token's share of a gap.", PACE),
    histogram("lmdeploy:iter_token_latency", "gap", "From one output of a request to the next (s).", PACE),
    histogram("lmdeploy:e2e_request_latency_seconds", "e2el", "From arrival to the last tokens.", WHOLE),
    histogram("lmdeploy:request_queue_time_seconds", "queue_time", "From the engine's queue to the first step.", WHOLE),
    histogram("lmdeploy:request_inference_time_seconds", "inference", "From the first step to the last tokens.", WHOLE),
    histogram("lmdeploy:request_prefill_time_seconds", "prefill", "From the first step to the first tokens.", WHOLE),
    histogram("lmdeploy:request_decode_time_seconds", "decode", "From the first tokens to the last.", WHOLE),
)  # fmt: skip

LMDEPLOY = Face(
    "lmdeploy", "LMDeploy 0.18.0", METRICS,
    {"engine": lambda model, index, count: {"model_name": model, "engine": str(index)}, "process": no_labels},
    lambda fleet, model: None, handles=True,
)  # fmt: skip
