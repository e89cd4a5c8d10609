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


def pairs_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each expert's pairs start [E + 1], the pairs by expert [N k], and each pair's place there.

    A pair is row x k + column; an expert's pairs keep their order. All int32.
    """
    of_pair, order = experts.reshape(-1).sort(stable=True)
    start = torch.searchsorted(of_pair, torch.arange(num_experts + 1, device=experts.device))
    return start.int(), order.int(), order.argsort().int()


def sum_of_pairs(read: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each row's pairs, in fp32: read [N k, h] at their places, weights [N, k]; [N, h]."""
    return (read[place.long()].view(*weights.shape, -1).float() * weights[..., None]).sum(1).to(read.dtype)
