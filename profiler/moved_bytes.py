"""The cost of keeping full-sequence caches, for a roofline: seconds per row by phase, from bytes moved.

Counted in the public code (full-sequence-diffusion.md 1.4, 2.4, 3.1), in a token's KV of all layers K and its cached
outputs O; each byte read or written counts once. Arithmetic, such as dLLM-Cache's value projections and MaskKV's votes,
is left out.
"""

from ..engine.latency import CacheOverhead
from .models import BYTES, ModelShape
from .profile import digits

RETENTION, BUDGET = 0.5, 256  # assumed: the papers' defaults for Sparse-dLLM and MaskKV
# A copy is a read and a write. Keys are half of K; keys cached before RoPE are turned in every pass.
COPY, TURN, WRITE, READ = 2.0, 1.0, 1.0, 1.0

# By cache and phase: K per token of the request, O per token of the request, K per row.
MOVED: dict[tuple[str, str], tuple[float, float, float]] = {
    # Fast-dLLM stores a full pass; its block overwrites it in place.
    ("FastCache", "full"): (WRITE, 0.0, 0.0),
    ("FastCache", "reuse"): (TURN, 0.0, 0.0),
    # Sparse-dLLM: clone KV, join it around the block, score keys, gather the kept ones.
    ("SparseCache", "pack"): (2 * COPY + READ / 2 + RETENTION * COPY, 0.0, 0.0),
    ("SparseCache", "reuse"): (RETENTION * COPY, 0.0, 0.0),
    # dLLM-Cache: write all layers' features; join prompt's and response's keys and apply RoPE.
    ("PeriodicCache", "full"): (WRITE, WRITE, 0.0),
    ("PeriodicCache", "refresh_response"): (COPY + TURN, READ, 0.0),
    ("PeriodicCache", "refresh_prompt"): (COPY + TURN, READ, 0.0),
    ("PeriodicCache", "partial"): (COPY + TURN, READ, 0.0),
    # MaskKV keeps a budget of the prompt's keys and none of its outputs.
    ("MaskKV", "full"): (WRITE + READ, 0.0, BUDGET * COPY),
    ("MaskKV", "refresh_response"): (0.0, 0.0, BUDGET * (COPY + TURN)),
    ("MaskKV", "refresh_prompt"): (WRITE + READ, 0.0, BUDGET * COPY),
    ("MaskKV", "partial"): (0.0, 0.0, BUDGET * (COPY + TURN)),
}
# The device takes longer than the host's launches.
WHOLE = ("full", "pack")


def cache_overhead(model: ModelShape, bandwidth: float, *, launched: bool) -> tuple[CacheOverhead, ...]:
    """Seconds per row of each phase beyond its features; bandwidth: bytes/s.

    launched: an eager implementation, whose launches hide the bytes of partial passes.
    """
    keys = model.kv_bytes_per_token / bandwidth
    outputs = 2 * model.layers * model.hidden * BYTES / bandwidth
    return tuple(
        CacheOverhead(cache, phase, digits(a_row * keys), digits(a_token * keys + b_token * outputs))
        for (cache, phase), (a_token, b_token, a_row) in MOVED.items()
        if phase in WHOLE or not launched
    )
