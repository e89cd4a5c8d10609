"""The decoder: RMSNorm, grouped-query attention, RoPE, SwiGLU or experts, on rows of tokens (live/families.py)."""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..kernels.add_rms_norm import add_rms_norm
from ..kernels.device import logits_of
from ..kernels.grouped_experts import grouped_experts
from ..kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_scatter
from ..kernels.route_experts import route_experts
from ..kernels.swiglu import swiglu
from .config import Experts, ModelConfig, RopeScaling
from .random_weights import of_rows


class Attend(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim] to [rows, heads, head_dim]."""


class Pages(NamedTuple):
    """Where some rows' KV is written."""

    keys: Tensor  # [pages, page_size, kv_heads, head_dim]; so are the values
    values: Tensor
    slots: Tensor  # [rows], page x page_size + offset; negative: not written


class Decoder(nn.Module):
    """From token ids and positions to final hidden states; rows of any sequences."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        if not config.tied:
            self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.frequencies = frequencies(config, "cpu")  # real, even if weights are on the meta device

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden]."""
        return self.embedding.weight if self.config.tied else self.head.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Normed final hidden states [rows, hidden] of tokens [rows] at positions [rows]."""
        x, cos, sin = self.enter(tokens, positions)
        added = None
        for layer in self.layers:
            x, added = layer(x, added, cos, sin, attend)
        return self.leave(x, added)

    def enter(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first layer's input, [rows, hidden], and RoPE's cosines and sines, [rows, head_dim / 2]."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        x = self.embedding(tokens)
        cos, sin = angles.cos(), angles.sin()
        if self.config.scaling is not None:
            cos, sin = cos * self.config.scaling.attention, sin * self.config.scaling.attention
        return x, cos.to(x.dtype), sin.to(x.dtype)

    def leave(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        return self.norm(x, added)[1]  # type: ignore[no-any-return]

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
    """Attention and feed-forward, each after its norm; projections of one input are one matrix.

    A half's output is added in the next norm: one pass over memory, not two.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.split = (config.heads, config.kv_heads, config.kv_heads)
        self.head_dim = config.head_dim
        width = config.heads * config.head_dim
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.qkv = nn.Linear(config.hidden, sum(self.split) * config.head_dim, bias=config.qkv_bias)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.output = nn.Linear(width, config.hidden, bias=False)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps)
        if config.experts is not None and config.has_experts(index):
            self.experts = MixedFeedForward(config, config.experts)
        else:
            self.gate_up = nn.Linear(config.hidden, 2 * config.ffn, bias=False)
            self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(
        self, x: Tensor, added: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        x, q, k, v = self.project(x, cos, sin, added)
        return self.finish(x, attend(self.index, q, k, v))

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x + added, and its queries, keys and values, [rows, heads or kv_heads, head_dim]."""
        x, qkv = self._projected(x, added)
        return x, *qk_norm_rope(qkv, self.split[0], *self.qk_norms, self.attention_norm.eps, cos, sin)

    def project_to(
        self, pages: Pages, x: Tensor, cos: Tensor, sin: Tensor, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`project`, with KV written to pages: x + added, and queries."""
        x, qkv = self._projected(x, added)
        heads = (qkv, self.split[0], *self.qk_norms, self.attention_norm.eps, cos, sin)
        return x, qk_norm_rope_scatter(*heads, *pages)

    def _projected(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        x, normed = self.attention_norm(x, added)
        return x, self.qkv(normed).view(len(x), sum(self.split), self.head_dim)

    def values(self, x: Tensor) -> Tensor:
        """`project`'s values alone, [rows, kv_heads, head_dim]."""
        of_values = slice(-self.split[2] * self.head_dim, None)
        bias = None if self.qkv.bias is None else self.qkv.bias[of_values]
        values = nn.functional.linear(self.attention_norm(x)[1], self.qkv.weight[of_values], bias)
        return values.view(len(x), self.split[2], self.head_dim)

    def finish(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The stream after attention, and its feed-forward's output."""
        x, normed = self.ffn_norm(x, self.output(attended.reshape(len(x), -1)))
        return x, self._fed(normed)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Of a stream with attention added."""
        return self._fed(self.ffn_norm(x)[1])

    def _fed(self, normed: Tensor) -> Tensor:
        if hasattr(self, "experts"):
            return self.experts(normed)  # type: ignore[no-any-return]
        return self.down(swiglu(self.gate_up(normed)))  # type: ignore[no-any-return]

    @property
    def qk_norms(self) -> tuple[Tensor | None, Tensor | None]:
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            return self.q_norm.weight, self.k_norm.weight
        return None, None


class RMSNorm(nn.Module):
    """In fp32 for any dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x + added, and its norm."""
        return add_rms_norm(x, added, self.weight, self.eps)


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
        logits = logits_of(x, self.router.weight)
        # Computed all the same, for its time.
        return logits if self.drawn is None else of_rows(self.drawn, len(x))


def route(logits: Tensor, about: Experts, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Experts [rows, top_k] int64 and fp32 weights, from fp32 logits [rows, num]."""
    return route_experts(
        logits, bias, about.top_k, scoring=about.scoring, groups=about.groups, top_groups=about.top_groups,
        normed=about.normed, scale=about.scale,
    )  # fmt: skip
