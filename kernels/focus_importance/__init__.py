"""FOCUS's importance of masked tokens: the attention that each gets from all of them (focus.md 3.3)."""

import itertools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ..operation import operation


@operation("q float T H D", "k q T Hkv D", "masked int64 M", "masked_start int32 starts")
def focus_importance(q: Tensor, k: Tensor, masked: Tensor, masked_start: Tensor) -> Tensor:
    """The importance of every masked token, [M] fp32; it sums to (query heads) x (masked tokens) in each sequence.

    Scores of masked queries on masked keys are pooled, along the sequence's list of masked tokens, to the maximum of a
    key and its two neighbours. Importance is their soft-max over keys, summed over queries and heads.

    q [T, H, D] and k [T, Hkv, D] as for attention; masked [M] int64, rows of q and k, sequence after sequence;
    masked_start [S+1] int32.
    """
    importance = torch.empty(len(masked), dtype=torch.float32, device=q.device)
    group = q.shape[1] // k.shape[1]
    for first, last in itertools.pairwise(masked_start.tolist()):
        if first < last:
            rows = masked[first:last]
            b_q = q[rows].float().transpose(0, 1)  # [H, M, D]
            b_k = k[rows].float().transpose(0, 1).repeat_interleave(group, 0)
            scores = b_q @ b_k.transpose(1, 2) * q.shape[2] ** -0.5
            pooled = F.max_pool1d(scores, 3, stride=1, padding=1)
            importance[first:last] = pooled.softmax(-1).sum((0, 1))
    return importance
