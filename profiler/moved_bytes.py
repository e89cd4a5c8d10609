"""The cost of keeping full-sequence caches, for a roofline: seconds of a row by phase, from the bytes that it moves.

Counted in the public codes (full-sequence-diffusion.md 1.4, 2.4, 3.1), in units of a token's keys and values K (all
layers) and of its cached outputs O; a byte read and a byte written count one each. Arithmetic is left out: dLLM-Cache's
value projections, MaskKV's votes.
"""

from ..engine.latency import CacheOverhead
from .models import BYTES, ModelShape
from .profile import digits

RETENTION, BUDGET = 0.5, 256  # assumed of Sparse-dLLM's and of MaskKV's kept keys: their papers' defaults
# A copy is read and written. Keys are half of K, and turned anew (RoPE) in every pass where they are cached unturned.
COPY, TURN, WRITE, READ = 2.0, 1.0, 1.0, 1.0

# Cache and phase: K a token of the request, O a token of the request, K a row.
MOVED: dict[tuple[str, str], tuple[float, float, float]] = {
    # Fast-dLLM keeps what a full pass computes, and its block overwrites it in place.
    ("FastCache", "full"): (WRITE, 0.0, 0.0),
    ("FastCache", "reuse"): (TURN, 0.0, 0.0),
    # Sparse-dLLM: keys and values cloned, joined around the block, scored (keys alone), and the kept ones gathered.
    ("SparseCache", "pack"): (2 * COPY + READ / 2 + RETENTION * COPY, 0.0, 0.0),
    ("SparseCache", "reuse"): (RETENTION * COPY, 0.0, 0.0),
    # dLLM-Cache: features of all layers are written, and keys of prompt and response joined and turned.
    ("PeriodicCache", "full"): (WRITE, WRITE, 0.0),
    ("PeriodicCache", "refresh_response"): (COPY + TURN, READ, 0.0),
    ("PeriodicCache", "refresh_prompt"): (COPY + TURN, READ, 0.0),
    ("PeriodicCache", "partial"): (COPY + TURN, READ, 0.0),
    # MaskKV keeps no outputs of the prompt, and of its keys a budget.
    ("MaskKV", "full"): (WRITE + READ, 0.0, BUDGET * COPY),
    ("MaskKV", "refresh_response"): (0.0, 0.0, BUDGET * (COPY + TURN)),
    ("MaskKV", "refresh_prompt"): (WRITE + READ, 0.0, BUDGET * COPY),
    ("MaskKV", "partial"): (0.0, 0.0, BUDGET * (COPY + TURN)),
}
# Phases that compute the whole sequence, and take the device longer than their launches take the host.
WHOLE = ("full", "pack")


def cache_overhead(model: ModelShape, bandwidth: float, *, launched: bool) -> tuple[CacheOverhead, ...]:
    """Seconds of a row of each phase beyond its features, at this bandwidth (bytes/s).

    launched: an eager implementation, where launches hide the bytes of a pass over part of the sequence.
    """
    keys = model.kv_bytes_per_token / bandwidth
    outputs = 2 * model.layers * model.hidden * BYTES / bandwidth
    return tuple(
        CacheOverhead(cache, phase, digits(a_row * keys), digits(a_token * keys + b_token * outputs))
        for (cache, phase), (a_token, b_token, a_row) in MOVED.items()
        if phase in WHOLE or not launched
    )
