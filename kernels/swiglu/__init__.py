"""The gate of a SwiGLU feed-forward."""

from torch import Tensor

from .. import run
from ..checks import FLOATS, check_tensor
from . import reference


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [N, f], of gate_up [N, 2f], gates first."""
    check_tensor("gate_up", gate_up, gate_up.device, FLOATS, "N", "2f")
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns, expected an even number")
    return run(reference.swiglu, gate_up, gate_up)
