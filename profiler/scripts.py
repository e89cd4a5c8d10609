"""Host cost of public full-sequence code: research scripts and dLLM-Serve's server.

They launch kernels one by one: a short pass takes its launches' time, on any GPU, in proportion to layers.
"""

from .models import ModelShape
from .profile import Implementation, digits

LAYERS = 32  # of LLaDA-8B, which all ran
FAST_PASS, SPARSE_PASS = 0.046, 0.0256  # s per pass
# dLLM-Serve loops over requests in Python: about half of its 10 ms a request and step.
SERVE_REQUEST = 0.005  # s

_TABLE = "Sparse-dLLM, Table 1 (LLaDA-8B of 32 layers, RTX 4090, batch 1)"
_FAST = f"{_TABLE}: Fast-dLLM's reuse passes take 45.4 to 47.0 ms whatever the length"
SPARSE = f"{_TABLE}: Sparse-dLLM's reuse passes take 25.7 to 26.4 ms whatever the length"
_SERVE = "dLLM-Serve's runs on an L40S: 10 ms a request and step, of which computing explains about half"
# Their floors were calibrated to whole runs, with the bytes that caches move.
_WHOLE = {"host_step": 0.0, "host_request": 0.0, "cache_overhead": list[object]()}


def scripts(model: ModelShape) -> tuple[Implementation, ...]:
    layers = model.layers
    return (
        script("fast-dllm", "the script of Fast-dLLM", layers, FAST_PASS, f"calibrated: {_FAST}"),
        script("sparse-dllm", "the script of Sparse-dLLM", layers, SPARSE_PASS, f"calibrated: {SPARSE}"),
        script("dllm-cache", "the script of dLLM-Cache", layers, FAST_PASS, f"estimated: as Fast-dLLM's; {_FAST}"),
        script("dllm-serve", "the server dLLM-Serve", layers, SPARSE_PASS, f"estimated: {SPARSE}", SERVE_REQUEST),
    )


def script(
    name: str, words: str, layers: int, seconds: float, source: str, host_request: float = 0.0
) -> Implementation:
    """Code that takes `seconds` a pass of LLaDA-8B's layers, and host time a request."""
    sources = [f"launch of {layers} x {seconds / LAYERS * 1e3:.4g} ms, {source}"]
    if host_request:
        sources.append(f"host_request of {host_request * 1e3:.4g} ms, calibrated: {_SERVE}")
    latency = {**_WHOLE, "launch": digits(layers * (seconds / LAYERS)), "host_request": host_request}
    return Implementation(name, words, {"latency": latency}, tuple(sources))
