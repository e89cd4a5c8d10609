"""Routing in plain PyTorch: the specification."""

import torch
from torch import Tensor


def route_experts(
    logits: Tensor, bias: Tensor | None, top_k: int, scoring: str, groups: int, top_groups: int, normed: bool,
    scale: float, expert_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(dim=-1)
    preferred = scores if bias is None else scores + bias
    if groups > 1:
        by_group = preferred.view(len(preferred), groups, -1)
        best = first(by_group.topk(2, dim=-1).values.sum(dim=-1), top_groups)
        out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
        preferred = by_group.masked_fill(out[..., None], float("-inf")).flatten(1)
    chosen = first(preferred, top_k)
    weights = scores.gather(1, chosen)
    if normed and top_k > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    if expert_scale is not None:
        weights = weights * expert_scale[chosen]
    return chosen, weights * scale


def first(x: Tensor, num: int) -> Tensor:
    """Indices of a row's largest numbers, descending; ties go to the lowest."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :num]
