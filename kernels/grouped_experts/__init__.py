"""The feed-forward of a mixture of experts: each row through the experts that it was routed to."""

import torch

from .. import take
from ..checks import check_dense, check_device, check_dtype, check_shape
from . import reference

ACTIVATIONS = ("silu", "gelu")


def grouped_experts(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:  # fmt: skip
    """The sum over a row's experts e of weight * down[e] @ (activation(gate) * up), [N, h], in x's dtype.

    activation: silu, or gelu by its approximation with tanh (Gemma).
    x [N, h]; experts [N, k] int64, each row's own, 0 to E - 1; weights [N, k] fp32; gate_up [E, 2f, h], gates and then
    what they let through, and down [E, h, f], in x's dtype. Products are accumulated, and experts summed, in fp32.
    """
    check_shape("x", x, "N", "h")
    check_shape("experts", experts, len(x), "k")
    check_shape("weights", weights, len(x), experts.shape[1])
    check_shape("gate_up", gate_up, "E", "2f", x.shape[1])
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} rows an expert, expected an even number")
    check_shape("down", down, len(gate_up), x.shape[1], gate_up.shape[1] // 2)
    check_dtype("x", x, torch.float32, torch.bfloat16, torch.float16)
    check_dtype("experts", experts, torch.int64)
    check_dtype("weights", weights, torch.float32)
    for name, tensor in {"x": x, "experts": experts, "weights": weights, "gate_up": gate_up, "down": down}.items():
        check_device(name, tensor, x.device)
        check_dense(name, tensor)
    for name, tensor in {"gate_up": gate_up, "down": down}.items():
        check_dtype(name, tensor, x.dtype)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected silu or gelu")
    if take("grouped_experts", x) == "reference":
        return reference.grouped_experts(x, experts, weights, gate_up, down, activation)
    from . import kernel

    return kernel.grouped_experts(x, experts, weights, gate_up, down, activation)
