"""What the steps of public full-sequence code cost on the host: research scripts and dLLM-Serve's server.

They launch kernels one by one: a short pass takes as long as its launches, whatever the GPU, in proportion to layers.
"""

from .models import ModelShape
from .profile import CostTerm, Implementation

LAYERS = 32  # of LLaDA-8B, which all of them ran
FAST_PASS, SPARSE_PASS = 0.046, 0.0256  # s a pass
# dLLM-Serve loops over requests in Python: about half of its 10 ms a request and step.
SERVE_REQUEST = 0.005  # s

_TABLE = "Sparse-dLLM, Table 1 (LLaDA-8B of 32 layers, RTX 4090, batch 1)"
_FAST = f"{_TABLE}: Fast-dLLM's reuse passes take 45.4 to 47.0 ms whatever the length"
_SPARSE = f"{_TABLE}: Sparse-dLLM's reuse passes take 25.7 to 26.4 ms whatever the length"
_SERVE = "dLLM-Serve's runs on an L40S: 10 ms a request and step, of which computing explains about half"
# Read off whole runs, what their caches move included.
_WHOLE = {"latency": {"host_step": 0.0, "host_request": 0.0, "cache_overhead": []}}


def scripts(model: ModelShape) -> tuple[Implementation, ...]:
    """The implementations of a full-sequence model."""

    def launches(a_pass: float, basis: str, source: str) -> CostTerm:
        return CostTerm("launch", a_pass / LAYERS, model.layers, basis, source)

    fast, sparse = launches(FAST_PASS, "calibrated", _FAST), launches(SPARSE_PASS, "calibrated", _SPARSE)
    as_fast = launches(FAST_PASS, "estimated", f"as Fast-dLLM's; {_FAST}")
    as_sparse = launches(SPARSE_PASS, "estimated", f"as Sparse-dLLM's; {_SPARSE}")
    a_request = CostTerm("host_request", SERVE_REQUEST, 1, "calibrated", _SERVE)
    return (
        Implementation("fast-dllm", "the script of Fast-dLLM", (fast,), _WHOLE),
        Implementation("sparse-dllm", "the script of Sparse-dLLM", (sparse,), _WHOLE),
        Implementation("dllm-cache", "the script of dLLM-Cache", (as_fast,), _WHOLE),
        Implementation("dllm-serve", "the server dLLM-Serve", (as_sparse, a_request), _WHOLE),
    )
