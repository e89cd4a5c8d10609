"""The residual stream with a sub-layer's output added, and the norm of the sum."""

import torch

from .. import take
from ..checks import check_dense, check_device, check_dtype, check_shape
from . import reference


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + added, and its root-mean-square norm times weight, both [N, h] in x's dtype; sums are in fp32.

    x, added [N, h], weight [h], all of one dtype. added None: the norm of x, which is handed back as it is.
    """
    check_shape("x", x, "N", "h")
    check_shape("weight", weight, x.shape[1])
    check_dtype("x", x, torch.float32, torch.bfloat16, torch.float16)
    others = {"weight": weight}
    if added is not None:
        check_shape("added", added, *x.shape)
        others["added"] = added
    for name, tensor in others.items():
        check_dtype(name, tensor, x.dtype)
        check_device(name, tensor, x.device)
        check_dense(name, tensor)
    check_dense("x", x)
    if take("add_rms_norm", x) == "reference":
        return reference.add_rms_norm(x, added, weight, eps)
    from . import kernel

    return kernel.add_rms_norm(x, added, weight, eps)
