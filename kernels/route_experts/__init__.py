"""Choose each row's experts from the router's logits."""

import torch
from torch import Tensor

from .. import run
from ..checks import check_tensor
from . import reference

SCORINGS = ("softmax", "sigmoid")


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
    check_tensor("logits", logits, logits.device, torch.float32, "N", "E")
    num = logits.shape[1]
    if bias is not None:
        check_tensor("bias", bias, logits.device, torch.float32, num)
    if expert_scale is not None:
        check_tensor("expert_scale", expert_scale, logits.device, torch.float32, num)
    if scoring not in SCORINGS:
        raise ValueError(f"scoring is {scoring!r}, expected softmax or sigmoid")
    if groups < 1 or num % groups or (groups > 1 and num // groups < 2):
        raise ValueError(f"groups is {groups}, expected to divide {num} experts into 2 and more")
    if not 1 <= top_groups <= groups:
        raise ValueError(f"top_groups is {top_groups}, expected 1 to {groups}")
    most = num if groups == 1 else top_groups * (num // groups)
    if not 1 <= top_k <= most:
        raise ValueError(f"top_k is {top_k}, expected 1 to {most}")
    how = top_k, scoring, groups, top_groups, normed, float(scale), expert_scale
    return run(reference.route_experts, logits, logits, bias, *how)
