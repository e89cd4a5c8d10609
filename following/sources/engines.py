"""The metric names of vLLM 0.33, SGLang 0.5.23 and LMDeploy 0.18 by dsim's names, a table for each."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...engine.errors import DsimError
from ...files.read import cut, parsing
from .sample import MEAN_GAUGES, Buckets, Sample


@dataclass(frozen=True)
class Names:
    """An engine's metrics, by dsim's names. Of several names, the first on the page is read."""

    prefix: str
    counters: Mapping[str, tuple[str, ...]]
    gauges: Mapping[str, tuple[str, ...]]
    histograms: Mapping[str, tuple[str, ...]]
    settings: tuple[str, ...] = ()  # metrics with settings as labels
    added: Mapping[str, str] = field(default_factory=dict)  # a gauge to add to another one
    handles: bool = False  # a request waits for one of max_batch handles, and its latencies begin with it
    left_out: tuple[str, ...] = field(default=("engine", "engine_index", "engine_id"))  # labels that are no settings


ENGINES = {
    "vllm": Names(
        "vllm:",
        {
            "requests": ("request_success_total",),
            "prompt_tokens": ("prompt_tokens_total",),
            "cached_tokens": ("prompt_tokens_cached_total", "prefix_cache_hits_total"),
            "generation_tokens": ("generation_tokens_total",),
            "preemptions": ("num_preemptions_total",),
            "steps": ("diffusion_num_denoising_steps_total",),
            "positions": ("diffusion_num_canvas_positions_total",),
        },
        {
            "running": ("num_requests_running",),
            "waiting": ("num_requests_waiting",),
            "kv_usage": ("kv_cache_usage_perc",),
        },
        {
            "ttft": ("time_to_first_token_seconds",),
            "e2el": ("e2e_request_latency_seconds",),
            "queue": ("request_queue_time_seconds",),
            "input_length": ("request_prompt_tokens",),
            "output_length": ("request_generation_tokens",),
        },
        ("cache_config_info",),
    ),
    "sglang": Names(
        "sglang:",
        {
            "requests": ("num_requests_total",),
            "prompt_tokens": ("prompt_tokens_total",),
            "cached_tokens": ("cached_tokens_total",),
            "generation_tokens": ("generation_tokens_total",),
            "preemptions": ("num_retracted_requests_total",),
            "forward_seconds": ("forward_execution_seconds_total",),
            "forwards": ("cuda_graph_passes_total",),
            "host_seconds": ("scheduler_stage_seconds_total",),
            "idle_seconds": ("scheduler_idle_seconds_total",),
        },
        {"running": ("num_running_reqs",), "waiting": ("num_queue_reqs",), "kv_usage": ("token_usage",)},
        {
            "ttft": ("time_to_first_token_seconds",),
            "e2el": ("e2e_request_latency_seconds",),
            "queue": ("queue_time_seconds",),
            "input_length": ("prompt_tokens_histogram",),
            "output_length": ("generation_tokens_histogram",),
        },
    ),
    "lmdeploy": Names(
        "lmdeploy:",
        {
            "requests": ("request_success_total",),
            "prompt_tokens": ("prompt_tokens_total",),
            "cached_tokens": ("cached_tokens_total",),
            "generation_tokens": ("generation_tokens_total",),
        },
        {
            "running": ("num_requests_running",),
            "waiting": ("num_requests_waiting",),
            "kv_usage": ("gpu_cache_usage_perc",),
        },
        {
            "ttft": ("time_to_first_token_seconds",),
            "e2el": ("e2e_request_latency_seconds",),
            "queue": ("request_queue_time_seconds",),
            "input_length": ("request_prompt_tokens",),
            "output_length": ("request_generation_tokens",),
        },
        added={"waiting": "num_api_requests_waiting"},
        handles=True,
    ),
}

_Page = dict[str, list[tuple[dict[str, str], float]]]  # samples by name


def sample_of(text: str, time: float, where: str) -> Sample:
    """The sample of a Prometheus page; DsimError names the page if it is of none of the three engines.

    A page of `dsim serve` states its own time (s since 1970), which may pass faster from the server's start on.
    """
    from prometheus_client.parser import text_string_to_metric_families  # imported here: only `follow` needs it

    page: _Page = defaultdict(list)
    with parsing(where, "Prometheus metrics"):
        for family in text_string_to_metric_families(text):
            for found in family.samples:
                page[found.name].append((found.labels, float(found.value)))
    engine = next((name for name, own in ENGINES.items() if any(key.startswith(own.prefix) for key in page)), None)
    if engine is None:
        held = ", ".join(sorted(page)[:3]) or "nothing"
        expected = ", ".join(f"{own.prefix}*" for own in ENGINES.values())
        raise DsimError(f"{where}: holds {cut(held)}, expected the metrics of an engine: {expected}")
    names = ENGINES[engine]
    counters = {ours: _total(page, names, theirs) for ours, theirs in names.counters.items()}
    gauges = {ours: _total(page, names, theirs, ours) for ours, theirs in names.gauges.items()}
    for ours, more in names.added.items():
        if (part := gauges[ours]) is not None:
            gauges[ours] = part + (_total(page, names, (more,)) or 0.0)
    histograms = {ours: _buckets(page, names, theirs) for ours, theirs in names.histograms.items()}
    known = {ours: buckets for ours, buckets in histograms.items() if buckets is not None}
    if counters["requests"] is None and "e2el" in known:
        counters["requests"] = known["e2el"].num
    settings = {
        key: value
        for metric in names.settings
        for labels, _ in page.get(names.prefix + metric, [])
        for key, value in labels.items()
        if key not in names.left_out
    }
    if gauges["running"] is None:
        raise DsimError(f"{where}: lacks {names.prefix}{names.gauges['running'][0]}, expected it among the metrics")
    # Some metrics only appear with the first request.
    none_yet = dict.fromkeys(("requests", "generation_tokens"), 0.0)
    for labels, _ in page.get("dsim_simulated", []):  # a twin's page (docs/serve-metrics.md)
        settings["dsim_speed"] = labels.get("dsim_speed", "1")
    own = [value for name in ("start", "time") for _, value in page.get(f"dsim_simulated_{name}_seconds", [])]
    if own:
        time = sum(own)
    engines = page.get(names.prefix + names.gauges["running"][0], [])
    return Sample(
        time, engine, max(1, len(engines)),
        none_yet | {n: v for n, v in counters.items() if v is not None},
        {"waiting": 0.0} | {n: v for n, v in gauges.items() if v is not None}, known, settings,
    )  # fmt: skip


def _rows(page: _Page, names: Names, theirs: tuple[str, ...], end: str = "") -> list[tuple[dict[str, str], float]]:
    return next((page[names.prefix + name + end] for name in theirs if names.prefix + name + end in page), [])


def _total(page: _Page, names: Names, theirs: tuple[str, ...], ours: str = "") -> float | None:
    """The sum over labels, or the mean of a gauge that is a share; None if the page lacks it."""
    values = [value for _, value in _rows(page, names, theirs) if math.isfinite(value)]
    if not values:
        return None
    return sum(values) / (len(values) if ours in MEAN_GAUGES else 1)


def _buckets(page: _Page, names: Names, theirs: tuple[str, ...]) -> Buckets | None:
    counts: dict[float, float] = defaultdict(float)
    for labels, value in _rows(page, names, theirs, "_bucket"):
        counts[float(labels.get("le", "nan"))] += value
    if math.inf not in counts or any(math.isnan(end) for end in counts):
        return None
    total = sum(value for _, value in _rows(page, names, theirs, "_sum"))
    ends = tuple(sorted(end for end in counts if end < math.inf))
    return Buckets(ends, tuple(counts[end] for end in (*ends, math.inf)), total)
