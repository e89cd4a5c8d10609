"""Packing in plain PyTorch: the specification."""

import torch
from torch import Tensor


def compact(
    retained: Tensor, query_start: Tensor, tensors: tuple[Tensor, ...], num_retained: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    rows = retained.nonzero().squeeze(1)[:num_retained]
    before = torch.cat([retained.new_zeros(1, dtype=torch.int64), retained.cumsum(0)])
    return before[query_start].int(), rows, [tensor[rows] for tensor in tensors]
