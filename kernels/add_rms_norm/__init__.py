"""Add a sub-layer's output to the residual stream, and norm the sum."""

from torch import Tensor

from .. import run
from ..checks import FLOATS, check_tensor
from . import reference


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + added, and its root-mean-square norm times weight, both [N, h] in x's dtype; sums are in fp32.

    x, added [N, h], weight [h], of one dtype. added None: returns x and its norm.
    """
    check_tensor("x", x, x.device, FLOATS, "N", "h")
    check_tensor("weight", weight, x.device, x.dtype, x.shape[1])
    if added is not None:
        check_tensor("added", added, x.device, x.dtype, *x.shape)
    return run(reference.add_rms_norm, x, x, added, weight, eps)
