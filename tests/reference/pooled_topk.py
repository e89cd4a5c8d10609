"""The tokens kept by sparse caches: the highest max-pooled scores (full-sequence-diffusion.md 2.2, 4.6)."""

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def num_kept(num_candidates: int, retention: float, at_least: int = 0) -> int:
    """Candidates kept: Sparse-dLLM may keep none, dLLM-Serve at least one."""
    return min(num_candidates, max(at_least, math.floor(num_candidates * retention)))


def merged(scores: Floats, num_kv_heads: int, shared: bool) -> Floats:
    """Query heads' scores, [H, candidates], merged into one (shared) or one per KV head.

    Shared: added in head order, which ranks like the mean. Per KV head: the group's highest.
    """
    if shared:
        return np.add.accumulate(scores, axis=0, dtype=np.float32)[-1:]
    highest: Floats = scores.reshape(num_kv_heads, -1, scores.shape[1]).max(axis=1)
    return highest


def kept(scores: Floats, num: int, pool: int) -> npt.NDArray[np.int64]:
    """Candidates kept by each head, [heads, num], best first, ties by lower index.

    scores [heads, candidates]: before the block, then after it. Each counts as the highest within pool // 2 candidates;
    pool is odd.
    """
    if not scores.shape[1]:
        return np.zeros(scores.shape, np.int64)
    reach = pool // 2
    padded = np.pad(scores, ((0, 0), (reach, reach)), constant_values=-np.inf)
    pooled = np.lib.stride_tricks.sliding_window_view(padded, pool, axis=1).max(axis=2)
    return np.argsort(-pooled, axis=1, kind="stable")[:, :num]
