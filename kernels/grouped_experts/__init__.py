"""A mixture of experts: each row through its chosen experts."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from ..operation import operation


def _check(gate_up: Tensor, down: Tensor, activation: str, **_: Tensor) -> None:
    if gate_up.shape[1] != 2 * down.shape[2]:
        raise ValueError(f"gate_up has {gate_up.shape[1]} rows an expert, expected {2 * down.shape[2]}")
    if activation not in ("silu", "gelu"):
        raise ValueError(f"activation is {activation!r}, expected silu or gelu")


@operation(
    "x float N h", "experts int64 N k", "weights float32 N k", "gate_up x E both h", "down x E h f", check=_check
)
def grouped_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu"
) -> Tensor:
    """The sum over a row's experts e of weight * down[e] @ (activation(gate) * up), [N, h], in x's dtype.

    x [N, h]; experts [N, k] int64, 0 to E - 1, of each row; weights [N, k] fp32; gate_up [E, 2f, h], gates first, and
    down [E, h, f], in x's dtype. activation: silu, or gelu in its tanh approximation (Gemma). Products and sums
    accumulate in fp32.
    """
    num_rows, top_k = experts.shape
    out = torch.zeros((num_rows * top_k, x.shape[1]), dtype=torch.float32, device=x.device)
    of_pair = experts.reshape(-1)
    for expert in set(of_pair.tolist()):
        pairs = (of_pair == expert).nonzero()[:, 0]
        opened = gated(x[pairs // top_k] @ gate_up[expert].T, activation)
        out[pairs] = (opened @ down[expert].T).float() * weights.reshape(-1, 1)[pairs]
    return out.view(num_rows, top_k, x.shape[1]).sum(1).to(x.dtype)


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up, [N, f], of gate_up [N, 2f], gates first."""
    gate, up = gate_up.chunk(2, dim=1)
    if activation == "gelu":
        return gelu(gate, approximate="tanh") * up
    return silu(gate) * up
