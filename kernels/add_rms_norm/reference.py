"""A residual sum and its RMSNorm, in plain PyTorch: the specification."""

import torch
from torch.nn.functional import rms_norm


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the launcher. The norm is of the sum as its dtype holds it; PyTorch's own is in fp32 whatever the dtype."""
    x = x if added is None else x + added
    return x, rms_norm(x, weight.shape, weight, eps)
