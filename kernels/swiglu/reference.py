"""SwiGLU's gate in plain PyTorch: the specification."""

from torch import Tensor
from torch.nn.functional import gelu, silu


def swiglu(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up
