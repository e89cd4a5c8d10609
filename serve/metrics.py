"""The server's metrics for Prometheus under vLLM's names, computed from the journal's table on request."""

import json
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..engine.journal import STATUSES
from .fleet import Fleet

COMPLETED = STATUSES.index("completed")
# Upper ends of vLLM's buckets (s).
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0)  # fmt: skip
TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
         1920.0, 7680.0)  # fmt: skip

Floats = npt.NDArray[np.float64]


def exposition(fleet: Fleet, model: str) -> str:
    """The text of /metrics."""
    return "\n".join(_lines(fleet, model)) + "\n"


def _lines(fleet: Fleet, model: str) -> Iterator[str]:
    n = fleet.num_requests
    t = {name: column[:n].copy() for name, column in fleet.table.columns.items()}
    name = f"model_name={json.dumps(model, ensure_ascii=False)}"  # Prometheus escapes as JSON does
    engines = [f'{{engine="{engine.replica}",{name}}}' for engine in fleet.engines]
    gauges: dict[str, tuple[str, list[int] | list[float]]] = {
        "num_requests_running": ("Requests that hold pages.", [engine.num_running for engine in fleet.engines]),
        "num_requests_waiting": ("Requests that wait.", [replica.num_waiting for replica in fleet.replicas]),
        "kv_cache_usage_perc": (
            "Share of KV pages held, 0 to 1.",
            [engine.pages_held / engine.limits.num_pages for engine in fleet.engines],
        ),
    }
    for key, (about, values) in gauges.items():
        yield from _head(f"vllm:{key}", "gauge", about)
        for label, value in zip(engines, values, strict=True):
            yield f"vllm:{key}{label} {float(value):.17g}"
    done = t["status"] == COMPLETED
    begun = ~np.isnan(t["scheduled"])
    totals = [engine.totals for engine in fleet.engines]
    counters: dict[str, tuple[str, str, float]] = {
        "request_success": ("Requests that were served.", ',finished_reason="length"', done.sum()),
        "prompt_tokens": ("Tokens of prompts.", "", t["input_length"][begun].sum()),
        "generation_tokens": ("Tokens returned.", "", t["num_tokens"].sum()),
        "num_preemptions": ("Requests that lost their pages.", "", sum(x.preemptions for x in totals)),
    }
    if fleet.engines[0].policy.rows.commits == "masks":
        counters |= {
            "diffusion_num_denoising_steps": ("Denoising steps.", "", sum(x.forwards for x in totals)),
            "diffusion_num_canvas_positions": ("Canvas positions evaluated.", "", sum(x.tokens for x in totals)),
            "diffusion_num_committed_tokens": ("Tokens committed.", "", sum(x.committed for x in totals)),
        }
    for key, (about, label, total) in counters.items():
        yield from _head(f"vllm:{key}", "counter", about)
        yield f'vllm:{key}_total{{engine="0",{name}{label}}} {float(total):.17g}'
    first = t["first_emission"] - t["arrival"]
    whole = (t["finish"] - t["arrival"])[done]
    after_first = (whole - first[done])[t["num_tokens"][done] > 1]
    pace = after_first / (t["num_tokens"][done][t["num_tokens"][done] > 1] - 1)
    histograms: dict[str, tuple[str, Floats, tuple[float, ...]]] = {
        "time_to_first_token_seconds": ("From arrival to the first emission.", first[~np.isnan(first)], TTFT),
        "e2e_request_latency_seconds": ("From arrival to the last emission.", whole, WHOLE),
        "request_queue_time_seconds": ("From arrival to the prefill.", (t["scheduled"] - t["arrival"])[begun], WHOLE),
        "request_time_per_output_token_seconds": ("After the first emission, a token.", pace, TPOT),
    }
    for key, (about, seconds, ends) in histograms.items():
        yield from _histogram(f"vllm:{key}", about, seconds, ends, f'engine="0",{name}')


def _histogram(name: str, about: str, values: Floats, ends: tuple[float, ...], label: str) -> Iterator[str]:
    yield from _head(name, "histogram", about)
    below = np.searchsorted(np.sort(values), ends, side="right").tolist()
    for end, count in zip((*ends, "+Inf"), (*below, len(values)), strict=True):
        yield f'{name}_bucket{{{label},le="{end}"}} {count}'
    yield f"{name}_sum{{{label}}} {float(values.sum()):.17g}"
    yield f"{name}_count{{{label}}} {len(values)}"


def _head(name: str, kind: str, about: str) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
