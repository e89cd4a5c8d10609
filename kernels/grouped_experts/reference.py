"""Experts in plain PyTorch, one at a time: the specification."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu


def grouped_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    num_rows, top_k = experts.shape
    out = torch.zeros((num_rows * top_k, x.shape[1]), dtype=torch.float32, device=x.device)
    of_pair = experts.reshape(-1)
    for expert in set(of_pair.tolist()):
        pairs = (of_pair == expert).nonzero()[:, 0]
        gate, up = (x[pairs // top_k] @ gate_up[expert].T).chunk(2, dim=1)
        opened = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
        out[pairs] = ((opened * up) @ down[expert].T).float() * weights.reshape(-1, 1)[pairs]
    return out.view(num_rows, top_k, x.shape[1]).sum(1).to(x.dtype)
