"""Read a server's Prometheus metrics (vLLM's names), to check a client's file."""

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.errors import DsimError
from ...files.read import quoted, read_text
from ...results.manifest import Manifest
from ...results.metrics import COMPLETED
from ...results.run import Columns

# Histograms are read as means in ms.
COUNTERS = {
    "requests": "vllm:request_success_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "denoising_steps": "vllm:diffusion_num_denoising_steps_total",
    "canvas_positions": "vllm:diffusion_num_canvas_positions_total",
    "committed_tokens": "vllm:diffusion_num_committed_tokens_total",
}
MEANS = {
    "ttft_ms": "vllm:time_to_first_token_seconds",
    "tpot_ms": "vllm:request_time_per_output_token_seconds",
    "itl_ms": "vllm:inter_token_latency_seconds",
    "e2el_ms": "vllm:e2e_request_latency_seconds",
    "queue_time_ms": "vllm:request_queue_time_seconds",
}
TOLERANCE = 0.02  # relative; a larger difference of means is reported

_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?")


def read_samples(path: str | Path) -> dict[str, float]:
    """Samples summed over labels; DsimError names file and line."""
    text = read_text(path)
    found: dict[str, float] = defaultdict(float)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        sample = _SAMPLE.fullmatch(line.strip())
        try:
            value = float(sample[2]) if sample else math.nan
        except ValueError:
            value, sample = math.nan, None
        if sample is None:
            raise DsimError(f"{path}:{number}: is {quoted(line)}, expected a Prometheus sample: name{{labels}} value")
        found[sample[1]] += value
    if not any(name.startswith("vllm:") for name in found):
        raise DsimError(f"{path}: holds no vllm:* metrics, expected those of a vLLM server")
    return dict(found)


def summary_of(after: dict[str, float], before: dict[str, float] | None = None) -> dict[str, float]:
    """Counts, or their growth between two readings; missing and NaN are left out."""

    def grown(name: str) -> float | None:
        if name not in after:
            return None
        return after[name] - (before or {}).get(name, 0.0)

    found = {key: value for key, name in COUNTERS.items() if (value := grown(name)) is not None}
    for key, name in MEANS.items():
        total, count = grown(f"{name}_sum"), grown(f"{name}_count")
        if total is not None and count:
            found[key] = 1e3 * total / count
    if any(value < 0 for value in found.values()):
        raise DsimError("the metrics after are below those before: expected two readings of one server, in order")
    if (steps := found.get("denoising_steps")) and "committed_tokens" in found:
        found["tokens_per_step"] = found["committed_tokens"] / steps
    return {key: value for key, value in found.items() if math.isfinite(value)}


def differences(server: dict[str, float], columns: Columns, info: Manifest) -> list[str]:
    """The server's metrics against the client's file, a line each."""
    done = columns["status"] == COMPLETED
    summary: dict[str, Any] = info["policies"][0]
    mine = {
        "requests": float(done.sum()),
        "prompt_tokens": float(columns["input_length"][done].sum()),
        "generation_tokens": float(columns["num_tokens"][done].sum()),
        **{key: summary[key]["mean"] for key in ("ttft_ms", "tpot_ms", "e2el_ms")},
    }
    lines = []
    for key, value in mine.items():
        theirs = server.get(key)
        if theirs is None or value is None or np.isclose(theirs, value, rtol=0 if key in COUNTERS else TOLERANCE):
            continue
        lines.append(f"{key} is {theirs:,.6g} by the server's metrics and {value:,.6g} by the client's file")
    return lines
