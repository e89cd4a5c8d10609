"""The gate of a SwiGLU or GeGLU feed-forward."""

from torch import Tensor
from torch.nn.functional import gelu, silu

from ..operation import operation


def _check(gate_up: Tensor, activation: str) -> None:
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns, expected an even number")
    check_activation(activation)


def check_activation(activation: str) -> None:
    if activation not in ("silu", "gelu"):
        raise ValueError(f"activation is {activation!r}, expected silu or gelu")


@operation("gate_up float N 2f", check=_check)
def swiglu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up, [N, f], of gate_up [N, 2f], gates first.

    activation: silu, or gelu in its tanh approximation (Gemma).
    """
    return gated(gate_up, activation)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up
