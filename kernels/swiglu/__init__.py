"""The gate of a SwiGLU feed-forward."""

import torch

from .. import take
from ..checks import check_dense, check_dtype, check_shape
from . import reference


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [N, f]: gate_up [N, 2f] holds gates and then what they let through."""
    check_shape("gate_up", gate_up, "N", "2f")
    check_dtype("gate_up", gate_up, torch.float32, torch.bfloat16, torch.float16)
    check_dense("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns, expected an even number")
    if take("swiglu", gate_up) == "reference":
        return reference.swiglu(gate_up)
    from . import kernel

    return kernel.swiglu(gate_up)
