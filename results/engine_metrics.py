"""Quantities that vLLM 0.33, SGLang 0.5.23 and LMDeploy 0.18 publish, and their names: a table to write and to read."""

from dataclasses import dataclass
from typing import Literal

from ..engine.errors import DsimError

RELEASES = {"vllm": "vLLM 0.33.0", "sglang": "SGLang 0.5.23", "lmdeploy": "LMDeploy 0.18.0"}
WITH_HANDLES = "lmdeploy"  # a request waits for one of max_batch handles, and its latencies begin with it


@dataclass(frozen=True)
class Quantity:
    """A metric, and its name in each engine without the prefix; empty: the engine lacks it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    vllm: str = ""
    sglang: str = ""
    lmdeploy: str = ""
    diffusion: bool = False  # only of policies that commit masks

    def name_in(self, engine: str) -> str:
        """The name on an engine's page, with its prefix; empty if the engine lacks it."""
        name = {"vllm": self.vllm, "sglang": self.sglang, "lmdeploy": self.lmdeploy}[engine]
        return name and f"{engine}:{name}"


QUANTITIES = (
    Quantity("running", "gauge", "Requests that hold pages.",
             "num_requests_running", "num_running_reqs", "num_requests_running"),
    Quantity("waiting", "gauge", "Requests that wait.",
             "num_requests_waiting", "num_queue_reqs", "num_requests_waiting"),
    Quantity("waiting_for_handle", "gauge", "Requests that wait for one of the engine's max_batch handles.",
             lmdeploy="num_api_requests_waiting"),
    Quantity("kv_usage", "gauge", "Share of KV pages held, 0 to 1.",
             "kv_cache_usage_perc", "token_usage", "gpu_cache_usage_perc"),
    Quantity("requests", "counter", "Requests that were served.",
             "request_success_total", "num_requests_total", "request_success_total"),
    Quantity("prompt_tokens", "counter", "Tokens of prompts, counted at a request's first output.",
             "prompt_tokens_total", "prompt_tokens_total", "prompt_tokens_total"),
    Quantity("cached_tokens", "counter", "Tokens of prompts found in the cache.",
             "prompt_tokens_cached_total", "cached_tokens_total", "cached_tokens_total"),
    Quantity("generation_tokens", "counter", "Tokens returned.",
             "generation_tokens_total", "generation_tokens_total", "generation_tokens_total"),
    Quantity("prefix_queries", "counter", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries_total"),
    Quantity("prefix_hits", "counter", "Prompt tokens found in the prefix cache.", "prefix_cache_hits_total"),
    Quantity("preemptions", "counter", "Requests that lost their pages.",
             "num_preemptions_total", "num_retracted_requests_total"),
    Quantity("steps", "counter", "Rows of denoising steps.", "diffusion_num_denoising_steps_total", diffusion=True),
    Quantity("positions", "counter", "Positions that denoising steps computed.",
             "diffusion_num_canvas_positions_total", diffusion=True),
    Quantity("committed_tokens", "counter", "Positions that denoising steps committed.",
             "diffusion_num_committed_tokens_total", diffusion=True),
    Quantity("forward_seconds", "counter", "Time in forward passes.", sglang="forward_execution_seconds_total"),
    Quantity("forwards", "counter", "Forward passes of batches.", sglang="cuda_graph_passes_total"),
    Quantity("ttft", "histogram", "From arrival to the first tokens.",
             "time_to_first_token_seconds", "time_to_first_token_seconds", "time_to_first_token_seconds"),
    Quantity("gap", "histogram", "From one output of a request to the next.",
             "inter_token_latency_seconds", lmdeploy="iter_token_latency"),
    Quantity("gap_of_each_token", "histogram", "A token's share of a gap, once for each token.",
             sglang="inter_token_latency_seconds"),
    Quantity("gap_per_token", "histogram", "A token's share of a gap, once for each gap.",
             lmdeploy="time_per_output_token_seconds"),
    Quantity("tpot", "histogram", "A token's share of the decode time.",
             "request_time_per_output_token_seconds", "request_time_per_output_token_seconds"),
    Quantity("e2el", "histogram", "From arrival to the last tokens.",
             "e2e_request_latency_seconds", "e2e_request_latency_seconds", "e2e_request_latency_seconds"),
    Quantity("queue", "histogram", "From the engine's queue to the first step.",
             "request_queue_time_seconds", "queue_time_seconds", "request_queue_time_seconds"),
    Quantity("prefill", "histogram", "From the first step to the first tokens.",
             "request_prefill_time_seconds", lmdeploy="request_prefill_time_seconds"),
    Quantity("decode", "histogram", "From the first tokens to the last.",
             "request_decode_time_seconds", lmdeploy="request_decode_time_seconds"),
    Quantity("input_length", "histogram", "Tokens of a prompt.",
             "request_prompt_tokens", "prompt_tokens_histogram", "request_prompt_tokens"),
    Quantity("output_length", "histogram", "Tokens of a reply.",
             "request_generation_tokens", "generation_tokens_histogram", "request_generation_tokens"),
    Quantity("longest_output", "histogram", "Tokens of the longest reply.", "request_max_num_generation_tokens"),
    Quantity("iteration_tokens", "histogram", "Tokens of a step that returned some.", "iteration_tokens_total"),
)  # fmt: skip
BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}

# Upper edges of histograms' buckets.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0)  # fmt: skip
GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
         1920.0, 7680.0)  # fmt: skip
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
SGLANG_LENGTHS = (100.0, 300.0, 500.0, 700.0, 1000.0, 1500.0, *(1000.0 * n for n in range(2, 11)),
                  *(2500.0 * n for n in range(5, 13)), 35_000.0, 40_000.0, 60_000.0, 80_000.0, 100_000.0, 200_000.0,
                  300_000.0, 400_000.0, 600_000.0, 800_000.0, 1_000_000.0, 1_100_000.0)  # fmt: skip
SGLANG_TTFT = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0)
SGLANG_GAP = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6,
              0.8, 1.0, 2.0, 4.0, 6.0, 8.0)  # fmt: skip
SGLANG_QUEUE = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0,
                *(10.0 * n for n in range(3, 11)), *(100.0 * n for n in range(2, 11)), 1200.0, 1400.0, 1600.0, 1800.0,
                2000.0, 2500.0, 3000.0)  # fmt: skip
_VLLM = {
    "ttft": TTFT, "gap": GAP, "tpot": GAP, "e2el": WHOLE, "queue": WHOLE, "prefill": WHOLE, "decode": WHOLE,
    "iteration_tokens": STEP_TOKENS,
}  # fmt: skip
EDGES = {
    "vllm": _VLLM,
    "sglang": {
        "ttft": SGLANG_TTFT, "gap_of_each_token": SGLANG_GAP, "tpot": SGLANG_GAP, "queue": SGLANG_QUEUE,
        "e2el": (*SGLANG_TTFT, 600.0, 1200.0, 1800.0, 2400.0), "input_length": SGLANG_LENGTHS,
        "output_length": SGLANG_LENGTHS,
    },
    "lmdeploy": {**_VLLM, "gap": (0.005, *GAP), "gap_per_token": (0.005, *GAP)},
}  # fmt: skip


def edges_of(engine: str, quantity: str, context_limit: int) -> tuple[float, ...]:
    """Upper edges of a histogram's buckets; of lengths mostly 1, 2, 5, 10 ... up to the context limit."""
    if quantity in EDGES[engine]:
        return EDGES[engine][quantity]
    steps = (m * 10**e for e in range(len(str(context_limit))) for m in (1, 2, 5))
    return tuple(float(n) for n in steps if n <= context_limit)


def engine_of(policy: str, metrics_as: str | None = None) -> str:
    """The engine of --metrics-as, or the one in the policy's name; vLLM for other policies."""
    if metrics_as is not None and metrics_as not in RELEASES:
        raise DsimError(f"--metrics-as is {metrics_as}, expected one of {', '.join(RELEASES)}")
    return metrics_as or next((engine for engine in RELEASES if policy.startswith(engine)), "vllm")
