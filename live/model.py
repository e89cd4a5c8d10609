"""The decoder: RMSNorm, grouped-query attention with q/k-norm, RoPE and SwiGLU, on rows of tokens (SDAR, Qwen3)."""

from typing import Protocol

import torch
from torch import Tensor, nn

from .config import ModelConfig


class Attend(Protocol):
    """What a layer's queries see: it keeps keys and values where later steps find them, and attends."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim] to [rows, heads, head_dim]."""


class Decoder(nn.Module):
    """Token ids and their true positions in, final hidden states out; rows of any sequences side by side."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        if not config.tied:
            self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.frequencies = frequencies(config)

    @property
    def head_weight(self) -> Tensor:
        """The LM head, [vocab, hidden]."""
        return self.embedding.weight if self.config.tied else self.head.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Normed final hidden states [rows, hidden] of `tokens` [rows] at `positions` [rows]."""
        x, cos, sin = self.enter(tokens, positions)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)  # type: ignore[no-any-return]

    def enter(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first layer's input, [rows, hidden], and RoPE's cosines and sines, both [rows, 1, head_dim / 2]."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        x = self.embedding(tokens)
        return x, angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab]."""
        return hidden @ self.head_weight.T


def frequencies(config: ModelConfig, device: str | None = None) -> Tensor:
    """RoPE's angle a position, [head_dim / 2]: in fp32 whatever the weights' dtype, for positions reach far."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    return config.rope_theta**-half


class Layer(nn.Module):
    """Attention and feed-forward, each behind its norm. Projections of the same input are one matrix."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.split = (config.heads, config.kv_heads, config.kv_heads)
        self.head_dim = config.head_dim
        width = config.heads * config.head_dim
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.qkv = nn.Linear(config.hidden, sum(self.split) * config.head_dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.output = nn.Linear(width, config.hidden, bias=False)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps)
        self.gate_up = nn.Linear(config.hidden, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.finish(x, attend(self.index, *self.project(x, cos, sin)))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows, [rows, heads or kv_heads, head_dim]."""
        qkv = self.qkv(self.attention_norm(x)).view(len(x), -1, self.head_dim)
        q, k, v = qkv.split(self.split, dim=1)
        return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v

    def values(self, x: Tensor) -> Tensor:
        """Of what `project` gives the values alone, [rows, kv_heads, head_dim]."""
        weight = self.qkv.weight[-self.split[2] * self.head_dim :]
        return nn.functional.linear(self.attention_norm(x), weight).view(len(x), -1, self.head_dim)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, from its input and what its queries read."""
        x = x + self.output(attended.reshape(len(x), -1))
        return x + self.feed_forward(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """What the second half of the layer adds to rows, [rows, hidden]."""
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)  # type: ignore[no-any-return]


class RMSNorm(nn.Module):
    """Root-mean-square norm, in fp32 whatever the rows' dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # PyTorch's own is one fused pass, and keeps its sums in fp32.
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [rows, heads, head_dim]; a pair of components is (i, i + head_dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
