"""The tokens that a sparse cache keeps: the highest max-pooled scores (full-sequence-diffusion.md 2.2, 4.6)."""

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def num_kept(num_candidates: int, retention: float, at_least: int = 0) -> int:
    """How many candidates are kept: Sparse-dLLM may keep none, dLLM-Serve at least one."""
    return min(num_candidates, max(at_least, math.floor(num_candidates * retention)))


def merged(scores: Floats, num_kv_heads: int, shared: bool) -> Floats:
    """Query heads' scores, [H, candidates], merged for the heads that choose: one, or one a KV head.

    Shared, heads are added in order (which ranks as their mean); per head, a group's highest counts.
    """
    if shared:
        return np.add.accumulate(scores, axis=0, dtype=np.float32)[-1:]
    highest: Floats = scores.reshape(num_kv_heads, -1, scores.shape[1]).max(axis=1)
    return highest


def kept(scores: Floats, num: int, pool: int) -> npt.NDArray[np.int64]:
    """The candidates that each head keeps, [heads, num], best first, the lower index on ties.

    scores [heads, candidates]: all before the block, then all after it. Each counts as the highest within pool // 2
    candidates; pool is odd.
    """
    if not scores.shape[1]:
        return np.zeros(scores.shape, np.int64)
    reach = pool // 2
    padded = np.pad(scores, ((0, 0), (reach, reach)), constant_values=-np.inf)
    pooled = np.lib.stride_tricks.sliding_window_view(padded, pool, axis=1).max(axis=2)
    return np.argsort(-pooled, axis=1, kind="stable")[:, :num]
