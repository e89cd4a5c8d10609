"""Choose each row's experts from the router's logits."""

import torch
from torch import Tensor

from ..operation import operation


def _check(logits: Tensor, top_k: int, scoring: str, groups: int, top_groups: int, **_: object) -> None:
    num = logits.shape[1]
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring is {scoring!r}, expected softmax or sigmoid")
    if groups < 1 or num % groups or (groups > 1 and num // groups < 2):
        raise ValueError(f"groups is {groups}, expected to divide {num} experts into 2 and more")
    if not 1 <= top_groups <= groups:
        raise ValueError(f"top_groups is {top_groups}, expected 1 to {groups}")
    limit = num if groups == 1 else top_groups * (num // groups)
    if not 1 <= top_k <= limit:
        raise ValueError(f"top_k is {top_k}, expected 1 to {limit}")


@operation("logits float32 N E", "bias float32 E", "expert_scale float32 E", check=_check)
def route_experts(
    logits: Tensor, bias: Tensor | None, top_k: int, *, scoring: str = "softmax", groups: int = 1, top_groups: int = 1,
    normed: bool = True, scale: float = 1.0, expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each row's experts, [N, k] int64, best first, and their weights [N, k], fp32. Ties go to the lowest expert.

    logits [N, E] fp32; bias [E] fp32, or None, is added to scores to choose, not to weight. scoring: softmax or
    sigmoid. With groups, experts come from the `top_groups` groups whose two best scores have the largest sum
    (DeepSeek-V3, section 2.1.2; LLaDA2.0). normed: divide the chosen scores by their sum; scale: then multiply by it;
    expert_scale [E] fp32: then by each expert's (Gemma 4).
    """
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
