"""SwiGLU's gate in plain PyTorch: the specification."""

from torch import Tensor
from torch.nn.functional import silu


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return silu(gate) * up
