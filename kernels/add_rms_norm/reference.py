"""Residual sum and RMSNorm in plain PyTorch: the specification."""

from torch import Tensor
from torch.nn.functional import rms_norm


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Norms the rounded sum, in fp32 for every dtype."""
    x = x if added is None else x + added
    return x, rms_norm(x, weight.shape, weight, eps)
