"""FOCUS's importance in plain PyTorch and fp32: the specification."""

import itertools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def focus_importance(q: Tensor, k: Tensor, masked: Tensor, masked_start: Tensor, scale: float) -> Tensor:
    importance = torch.empty(len(masked), dtype=torch.float32, device=q.device)
    group = q.shape[1] // k.shape[1]
    for first, last in itertools.pairwise(masked_start.tolist()):
        if first < last:
            rows = masked[first:last]
            b_q = q[rows].float().transpose(0, 1)  # [H, M, D]
            b_k = k[rows].float().transpose(0, 1).repeat_interleave(group, 0)
            scores = b_q @ b_k.transpose(1, 2) * scale
            pooled = F.max_pool1d(scores, 3, stride=1, padding=1)
            importance[first:last] = pooled.softmax(-1).sum((0, 1))
    return importance
