"""The decoder: RMSNorm, grouped-query attention, RoPE, SwiGLU or experts, on rows of tokens (live/families.py)."""

import math
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from ..kernels.device import logits_of
from ..kernels.grouped_experts import gated, grouped_experts
from ..kernels.qk_norm_rope import Norms, Pages, Turns, qk_norm_rope
from .config import Experts, ModelConfig, RopeScaling
from .random_weights import of_rows


class Attend(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim] to [rows, heads, head_dim]."""


class Decoder(nn.Module):
    """From token ids and positions to final hidden states; rows of any sequences."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)
        if not config.tied:
            self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.frequencies = frequencies(config, "cpu")  # real, even if weights are on the meta device

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden]."""
        return self.embedding.weight if self.config.tied else self.head.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Normed final hidden states [rows, hidden] of tokens [rows] at positions [rows]."""
        x, turns = self.enter(tokens, positions)
        for layer in cast(list[Layer], list(self.layers)):
            q, k, v = layer.project(x, turns)
            x = layer.finish(x, attend(layer.index, q, k, v))
        return self.norm(x)  # type: ignore[no-any-return]

    def enter(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Turns]:
        """The first layer's input, [rows, hidden], and RoPE's turns."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        x = self.embedding(tokens)
        cos, sin = angles.cos(), angles.sin()
        if self.config.scaling is not None:
            cos, sin = cos * self.config.scaling.attention, sin * self.config.scaling.attention
        return x, Turns(cos.to(x.dtype), sin.to(x.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab]."""
        return hidden @ self.head_weight.T


def frequencies(config: ModelConfig, device: str | None = None) -> Tensor:
    """RoPE's angle per position, [head_dim / 2], always fp32.

    Components that do not turn have angle 0 and come last (`weights.turned_first`).
    """
    turned = config.head_dim if config.rotary is None else config.rotary
    half = torch.arange(0, turned, 2, dtype=torch.float32, device=device) / turned
    angles = config.rope_theta**-half
    if config.scaling is not None:
        angles = stretched(angles, config.scaling, config.rope_theta)
    return nn.functional.pad(angles, (0, (config.head_dim - turned) // 2))


def stretched(angles: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Angles under a RoPE scaling."""
    if scaling.kind == "llama3":
        turns = scaling.original * angles / (2 * math.pi)
        share = (turns - scaling.slow) / (scaling.fast - scaling.slow)
    else:

        def component(turns: float) -> float:
            """The component with this many turns in the original context."""
            return len(angles) * math.log(scaling.original / (turns * 2 * math.pi)) / math.log(theta)

        low = max(math.floor(component(scaling.fast)), 0)
        high = min(math.ceil(component(scaling.slow)), 2 * len(angles) - 1)
        share = 1 - (torch.arange(len(angles), device=angles.device) - low) / max(high - low, 1e-3)
    share = share.clamp(0, 1)
    return angles * share + angles / scaling.factor * (1 - share)


class Layer(nn.Module):
    """Attention and feed-forward, each after its norm; projections of one input are one matrix."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.split = (config.heads, config.kv_heads, config.kv_heads)
        self.head_dim, self.norm_eps = config.head_dim, config.norm_eps
        width = config.heads * config.head_dim
        self.attention_norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.qkv = nn.Linear(config.hidden, sum(self.split) * config.head_dim, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(config.head_dim, config.norm_eps) for _ in range(2))
        self.output = nn.Linear(width, config.hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(config.hidden, config.norm_eps)
        if config.experts is not None and config.has_experts(index):
            self.experts = MixedFeedForward(config, config.experts)
        else:
            self.gate_up = nn.Linear(config.hidden, 2 * config.ffn, bias=False)
            self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def project(self, x: Tensor, turns: Turns) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [rows, heads or kv_heads, head_dim]."""
        k, v = (x.new_empty(len(x), 1, self.split[1], self.head_dim) for _ in range(2))
        q = self.project_to(Pages(k, v, torch.arange(len(x), device=x.device)), x, turns)
        return q, k[:, 0], v[:, 0]

    def project_to(self, pages: Pages, x: Tensor, turns: Turns) -> Tensor:
        """Queries; keys and values are written to pages."""
        qkv = self.qkv(self.attention_norm(x)).view(len(x), sum(self.split), self.head_dim)
        return qk_norm_rope(qkv, self.split[0], Norms(*self.qk_norms, self.norm_eps), turns, pages)

    def values(self, x: Tensor) -> Tensor:
        """`project`'s values alone, [rows, kv_heads, head_dim]."""
        of_values = slice(-self.split[2] * self.head_dim, None)
        bias: Tensor | None = self.qkv.bias
        if bias is not None:
            bias = bias[of_values]
        values = nn.functional.linear(self.attention_norm(x), self.qkv.weight[of_values], bias)
        return values.view(len(x), self.split[2], self.head_dim)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The stream after attention and feed-forward."""
        x = x + self.output(attended.reshape(len(x), -1))
        return x + self.feed_forward(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The feed-forward's output for a stream with attention added."""
        normed = self.ffn_norm(x)
        if hasattr(self, "experts"):
            return self.experts(normed)  # type: ignore[no-any-return]
        return self.down(gated(self.gate_up(normed)))  # type: ignore[no-any-return]

    @property
    def qk_norms(self) -> tuple[Tensor | None, Tensor | None]:
        if hasattr(self, "q_norm"):
            return self.q_norm.weight, self.k_norm.weight
        return None, None


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
        logits = logits_of(x, self.router.weight)  # [rows, num] fp32: near ties decide which experts run
        if self.drawn is not None:  # computed all the same, for its time
            logits = of_rows(self.drawn, len(x))
        chosen, weights = route(logits, self.about, getattr(self, "router_bias", None))
        out = grouped_experts(x, chosen, weights, self.gate_up, self.down)
        if self.about.shared:
            out = out + self.shared_down(gated(self.shared_gate_up(x)))
        return out


def route(
    logits: Tensor, about: Experts, bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Experts [rows, top_k] int64, best first, and fp32 weights, from fp32 logits [rows, num].

    bias: added to scores to choose, not to weight. expert_scale: of weights, by expert (Gemma 4). Both [num].
    """
    scores = logits.sigmoid() if about.scoring == "sigmoid" else logits.softmax(dim=-1)
    preferred = scores
    if bias is not None:
        preferred = scores + bias
    if about.groups > 1:
        by_group = preferred.view(len(preferred), about.groups, -1)
        best = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(about.top_groups, dim=-1).indices
        outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
        preferred = by_group.masked_fill(outside[..., None], float("-inf")).flatten(1)
    chosen = preferred.topk(about.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if about.normed and about.top_k > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    if expert_scale is not None:
        weights = weights * expert_scale[chosen]
    return chosen, weights * about.scale
