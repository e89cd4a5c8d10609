"""Read a server's Prometheus metrics, to check a client's file."""

import math
from typing import Any

import numpy as np

from ...engine.errors import DsimError
from ...results.engine_metrics import BY_NAME, RELEASES
from ...results.manifest import Manifest
from ...results.metrics import COMPLETED
from ...results.run import Columns

# Quantities by the names of a file's summary. Histograms are read as means in ms.
COUNTERS = {
    "requests": "requests", "prompt_tokens": "prompt_tokens", "generation_tokens": "generation_tokens",
    "preemptions": "preemptions", "denoising_steps": "steps", "canvas_positions": "positions",
    "committed_tokens": "committed_tokens",
}  # fmt: skip
MEANS = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "gap", "e2el_ms": "e2el", "queue_time_ms": "queue"}
TOLERANCE = 0.02  # relative; a larger difference of means is reported


def summary_of(after: dict[str, float], before: dict[str, float] | None = None) -> dict[str, float]:
    """Counts, or their growth between two readings; missing and NaN are left out."""
    engine = next((name for name in RELEASES if any(key.startswith(f"{name}:") for key in after)), "vllm")

    def grown(name: str) -> float | None:
        if name not in after:
            return None
        return after[name] - (before or {}).get(name, 0.0)

    found = {
        key: value for key, name in COUNTERS.items() if (value := grown(BY_NAME[name].name_in(engine))) is not None
    }
    for key, quantity in MEANS.items():
        name = BY_NAME[quantity].name_in(engine)
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
