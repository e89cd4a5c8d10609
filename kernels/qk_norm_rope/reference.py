"""Norm and RoPE in plain PyTorch: the specification."""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


def qk_norm_rope(
    qkv: Tensor, num_heads: int, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    values: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    num_kv_heads = (qkv.shape[1] - num_heads) // (1 if values == "keys" else 2)
    q, k, v = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads], qkv[:, -num_kv_heads:]
    if values != "plain":
        v = rms_norm(v, v.shape[-1:], None, eps)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight.shape, q_weight, eps), rms_norm(k, k_weight.shape, k_weight, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def qk_norm_rope_scatter(
    qkv: Tensor, num_heads: int, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    k_pages: Tensor, v_pages: Tensor, slots: Tensor, values: str,
) -> Tensor:  # fmt: skip
    q, k, v = qk_norm_rope(qkv, num_heads, q_weight, k_weight, eps, cos, sin, values)
    rows = (slots >= 0).nonzero().squeeze(1)
    for pages, fresh in ((k_pages, k), (v_pages, v)):
        pages[slots[rows] // pages.shape[1], slots[rows] % pages.shape[1]] = fresh[rows]
    return q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [N, heads, D]; a pair of components is (i, i + D / 2)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
