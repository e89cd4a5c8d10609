"""A mixture of experts in place of a layer's feed-forward: the router, the routed experts and the shared ones."""

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.grouped_experts import grouped_experts
from ..kernels.swiglu import swiglu
from .config import Experts, ModelConfig
from .random_weights import of_rows


class MixedFeedForward(nn.Module):
    """Each row through the `top_k` experts that its router scores best, and through the shared ones."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.about = experts
        self.product: Any = None  # expert_product.ExpertProduct, where there is a second product to choose
        self.drawn: Tensor | None  # rows' logits in place of the router's (random_weights.drawn_experts)
        self.register_buffer("drawn", None, persistent=False)
        self.router = nn.Linear(config.hidden, experts.num, bias=False)
        if experts.bias:
            self.router_bias = nn.Parameter(torch.zeros(experts.num))  # in fp32, whatever the weights are in
        self.gate_up = nn.Parameter(torch.empty(experts.num, 2 * experts.ffn, config.hidden))
        self.down = nn.Parameter(torch.empty(experts.num, config.hidden, experts.ffn))
        if experts.shared:
            self.shared_gate_up = nn.Linear(config.hidden, 2 * experts.shared * experts.ffn, bias=False)
            self.shared_down = nn.Linear(experts.shared * experts.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] to the same."""
        # In fp32: a near tie of scores decides which experts run.
        rows, router = x.float(), self.router.weight.float()
        if self.drawn is None:
            logits = nn.functional.linear(rows, router)
        else:
            logits = torch.addmm(of_rows(self.drawn, len(x)), rows, router.T)
        chosen, weights = route(logits, self.about, getattr(self, "router_bias", None))
        theirs = self.product is not None and self.product.takes(len(x))
        out = grouped_experts(x, chosen, weights, self.gate_up, self.down, grouped_mm=theirs)
        if self.about.shared:
            out = out + self.shared_down(swiglu(self.shared_gate_up(x)))
        return out


def route(logits: Tensor, about: Experts, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each row's experts, [rows, top_k] int64, and their weights, fp32, from logits [rows, num] in fp32."""
    scores = logits.sigmoid() if about.scoring == "sigmoid" else logits.softmax(dim=-1)
    preferred = scores if bias is None else scores + bias
    if about.groups > 1:
        by_group = preferred.view(len(preferred), about.groups, -1)
        best = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(about.top_groups, dim=-1).indices
        out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
        preferred = by_group.masked_fill(out[..., None], float("-inf")).flatten(1)
    chosen = preferred.topk(about.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if about.normed and about.top_k > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen, weights * about.scale
