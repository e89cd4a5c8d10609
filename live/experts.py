"""A mixture of experts: router, routed experts, shared ones."""

import torch
from torch import Tensor, nn

from ..kernels.grouped_experts import grouped_experts
from ..kernels.route_experts import route_experts
from ..kernels.swiglu import swiglu
from .config import Experts, ModelConfig
from .random_weights import of_rows
from .sampling import fp32_product


class MixedFeedForward(nn.Module):
    """Each row passes its `top_k` best experts and the shared ones."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.about = experts
        self.drawn: Tensor | None  # logits by row, in place of the router's (random_weights.drawn_experts)
        self.register_buffer("drawn", None, persistent=False)
        self.router = nn.Linear(config.hidden, experts.num, bias=False)
        if experts.bias:
            self.router_bias = nn.Parameter(torch.zeros(experts.num))  # fp32 in a model of any dtype
        self.gate_up = nn.Parameter(torch.empty(experts.num, 2 * experts.ffn, config.hidden))
        self.down = nn.Parameter(torch.empty(experts.num, config.hidden, experts.ffn))
        if experts.shared:
            self.shared_gate_up = nn.Linear(config.hidden, 2 * experts.shared * experts.ffn, bias=False)
            self.shared_down = nn.Linear(experts.shared * experts.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] to the same."""
        chosen, weights = route(self._logits(x), self.about, getattr(self, "router_bias", None))
        out = grouped_experts(x, chosen, weights, self.gate_up, self.down)
        if self.about.shared:
            out = out + self.shared_down(swiglu(self.shared_gate_up(x)))
        return out

    def _logits(self, x: Tensor) -> Tensor:
        """[rows, num] fp32: near ties decide which experts run."""
        logits = fp32_product(x, self.router.weight)
        # Computed all the same, for its time.
        return logits if self.drawn is None else of_rows(self.drawn, len(x))


def route(logits: Tensor, about: Experts, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Experts [rows, top_k] int64 and fp32 weights, from fp32 logits [rows, num]."""
    return route_experts(
        logits, bias, about.top_k, scoring=about.scoring, groups=about.groups, top_groups=about.top_groups,
        normed=about.normed, scale=about.scale,
    )  # fmt: skip
