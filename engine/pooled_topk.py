"""The tokens that a sparse cache keeps: the highest of max-pooled scores (full-sequence-diffusion.md 2.2, 4.6)."""

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def num_kept(num_candidates: int, retention: float, at_least: int = 0) -> int:
    """How many of the candidates are kept: Sparse-dLLM keeps none of very few, dLLM-Serve at least one."""
    return min(num_candidates, max(at_least, math.floor(num_candidates * retention)))


def merged(scores: Floats, num_kv_heads: int, shared: bool) -> Floats:
    """Scores of query heads, [H, candidates], put together for the heads that choose: one, or as many as KV heads.

    Shared, heads are added in their order (which ranks as their mean does); per head, a group's highest counts.
    """
    if shared:
        return np.add.accumulate(scores, axis=0, dtype=np.float32)[-1:]
    highest: Floats = scores.reshape(num_kv_heads, -1, scores.shape[1]).max(axis=1)
    return highest


def kept(scores: Floats, num: int, pool: int) -> npt.NDArray[np.int64]:
    """The candidates that each head keeps, [heads, num], the best first and the lower index on ties.

    scores [heads, candidates], where candidates are everything before the block and then everything after it. Each
    counts with the highest score within pool // 2 candidates of it; pool is odd.
    """
    if not scores.shape[1]:
        return np.zeros(scores.shape, np.int64)
    reach = pool // 2
    padded = np.pad(scores, ((0, 0), (reach, reach)), constant_values=-np.inf)
    pooled = np.lib.stride_tricks.sliding_window_view(padded, pool, axis=1).max(axis=2)
    return np.argsort(-pooled, axis=1, kind="stable")[:, :num]
