"""SwiGLU's gate in plain PyTorch: the specification."""

import torch
from torch.nn.functional import silu


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See the launcher."""
    gate, up = gate_up.chunk(2, dim=1)
    return silu(gate) * up
