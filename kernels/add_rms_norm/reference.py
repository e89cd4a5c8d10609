"""Residual sum and RMSNorm in plain PyTorch: the specification."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import rms_norm


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Norms the rounded sum, in fp32 for every dtype."""
    x = x if added is None else x + added
    return x, rms_norm(x, weight.shape, weight, eps)


def sandwich_norm(
    x: Tensor, parts: Sequence[Tensor], part_weights: Tensor | None, weight: Tensor, scale: Tensor | None,
    after: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    def normed(part: Tensor, by: Tensor) -> Tensor:
        return rms_norm(part.float(), by.shape, by, eps).to(x.dtype)

    total = parts[0]
    if part_weights is not None:
        total = normed(parts[0], part_weights[0]) + normed(parts[1], part_weights[1])
    x = x + normed(total, weight)
    if scale is not None:
        x = (x.float() * scale).to(x.dtype)
    return x, normed(x, after)
