"""The gate of a SwiGLU or GeGLU feed-forward."""

from torch import Tensor

from .. import run
from ..checks import FLOATS, check_tensor
from . import reference

ACTIVATIONS = ("silu", "gelu")


def swiglu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up, [N, f], of gate_up [N, 2f], gates first.

    activation: silu, or gelu in its tanh approximation (Gemma).
    """
    check_tensor("gate_up", gate_up, gate_up.device, FLOATS, "N", "2f")
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns, expected an even number")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected silu or gelu")
    return run(reference.swiglu, gate_up, gate_up, activation)
