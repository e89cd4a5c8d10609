"""Host cost of public full-sequence code: research scripts and dLLM-Serve's server.

They launch kernels one by one: a short pass takes its launches' time, on any GPU, in proportion to layers.
"""

from dataclasses import replace

from .models import ModelShape
from .profile import CostTerm, Implementation

LAYERS = 32  # of LLaDA-8B, which all ran
FAST_PASS, SPARSE_PASS = 0.046, 0.0256  # s per pass
# dLLM-Serve loops over requests in Python: about half of its 10 ms a request and step.
SERVE_REQUEST = 0.005  # s

_TABLE = "Sparse-dLLM, Table 1 (LLaDA-8B of 32 layers, RTX 4090, batch 1)"
_FAST = f"{_TABLE}: Fast-dLLM's reuse passes take 45.4 to 47.0 ms whatever the length"
_SPARSE = f"{_TABLE}: Sparse-dLLM's reuse passes take 25.7 to 26.4 ms whatever the length"
_SERVE = "dLLM-Serve's runs on an L40S: 10 ms a request and step, of which computing explains about half"
# Calibrated to whole runs, with the bytes that caches move.
_WHOLE = {"latency": {"host_step": 0.0, "host_request": 0.0, "cache_overhead": []}}


def scripts(model: ModelShape) -> tuple[Implementation, ...]:
    fast, sparse = CostTerm("launch", FAST_PASS / LAYERS, model.layers, "calibrated", _FAST), _as_sparse(model)
    return (
        Implementation("fast-dllm", "the script of Fast-dLLM", (fast,), _WHOLE),
        Implementation("sparse-dllm", "the script of Sparse-dLLM", (replace(sparse, basis="calibrated"),), _WHOLE),
        Implementation(
            "dllm-cache", "the script of dLLM-Cache",
            (replace(fast, basis="estimated", source=f"as Fast-dLLM's; {_FAST}"),), _WHOLE,
        ),
        Implementation(
            "dllm-serve", "the server dLLM-Serve",
            (sparse, CostTerm("host_request", SERVE_REQUEST, 1, "calibrated", _SERVE)), _WHOLE,
        ),
    )  # fmt: skip


def _as_sparse(model: ModelShape) -> CostTerm:
    return CostTerm("launch", SPARSE_PASS / LAYERS, model.layers, "estimated", _SPARSE)
