"""A mixture of experts: each row through its chosen experts."""

import torch
from torch import Tensor

from .. import run
from ..checks import FLOATS, check_tensor
from . import reference

ACTIVATIONS = ("silu", "gelu")


def grouped_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu"
) -> Tensor:
    """The sum over a row's experts e of weight * down[e] @ (activation(gate) * up), [N, h], in x's dtype.

    x [N, h]; experts [N, k] int64, 0 to E - 1, of each row; weights [N, k] fp32; gate_up [E, 2f, h], gates first, and
    down [E, h, f], in x's dtype. activation: silu, or gelu in its tanh approximation (Gemma). Products and sums
    accumulate in fp32.
    """
    check_tensor("x", x, x.device, FLOATS, "N", "h")
    check_tensor("experts", experts, x.device, torch.int64, len(x), "k")
    check_tensor("weights", weights, x.device, torch.float32, len(x), experts.shape[1])
    check_tensor("gate_up", gate_up, x.device, x.dtype, "E", "2f", x.shape[1])
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} rows an expert, expected an even number")
    check_tensor("down", down, x.device, x.dtype, len(gate_up), x.shape[1], gate_up.shape[1] // 2)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected silu or gelu")
    return run(reference.grouped_experts, x, x, experts, weights, gate_up, down, activation)
