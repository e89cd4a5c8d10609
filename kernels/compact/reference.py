"""Rows that stay, moved together, in plain PyTorch: the specification."""

import torch


def compact(
    retained: torch.Tensor, query_start: torch.Tensor, tensors: tuple[torch.Tensor, ...], num_retained: int
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """See the launcher."""
    rows = retained.nonzero().squeeze(1)[:num_retained]
    before = torch.cat([retained.new_zeros(1, dtype=torch.int64), retained.cumsum(0)])
    return before[query_start].int(), rows, [tensor[rows] for tensor in tensors]
