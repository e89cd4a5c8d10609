"""From the fused projection to queries, keys and values: norm heads and rotate them by position."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from ..operation import operation

Values = Literal["plain", "normed", "keys"]
TENSORS = ("qkv float N heads D", "cos qkv N D/2", "sin qkv N D/2", "q_weight qkv D", "k_weight qkv D")


def _check(
    qkv: Tensor, num_heads: int, q_weight: Tensor | None, k_weight: Tensor | None, values: Values,
    k_pages: Tensor | None = None, **_: object,
) -> None:  # fmt: skip
    heads, head_dim = qkv.shape[1:]
    if values not in ("plain", "normed", "keys"):
        raise ValueError(f"values is {values!r}, expected plain, normed or keys")
    if not 0 < num_heads < heads or (values != "keys" and (heads - num_heads) % 2):
        raise ValueError(f"num_heads is {num_heads}, expected to leave an even number of the {heads} heads of qkv")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"qkv has heads of {head_dim}, expected an even number")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight or k_weight is None, expected both or neither")
    if q_weight is None and values != "plain":
        raise ValueError(f"values is {values}, and keys have no norm: expected plain")
    num_kv_heads = kv_heads(qkv, num_heads, values)
    if k_pages is not None and k_pages.shape[2] != num_kv_heads:
        raise ValueError(f"k_pages has {k_pages.shape[2]} heads, expected {num_kv_heads}")


def kv_heads(qkv: Tensor, num_heads: int, values: str) -> int:
    return (qkv.shape[1] - num_heads) // (1 if values == "keys" else 2)


@operation(*TENSORS, check=_check)
def qk_norm_rope(
    qkv: Tensor, num_heads: int, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    values: Values = "plain",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q [N, H, D], k [N, Hkv, D] and v [N, Hkv, D], each contiguous and of qkv's dtype.

    Heads of q and k are RMS-normed (Qwen3, SDAR); component i of a head is rotated with i + D / 2 (RoPE).

    values: plain; normed without a weight; or the keys before their norm, so normed (Gemma 4). qkv [N, H + 2 Hkv, D]:
    queries, keys, and values unless they are keys; num_heads: H; q_weight, k_weight [D], or None for no norm; cos, sin
    [N, D / 2] of each row's angles. All of one dtype; the arithmetic is in fp32.
    """
    return _turned(qkv, num_heads, q_weight, k_weight, eps, cos, sin, values)


@operation(
    *TENSORS, "k_pages qkv num_pages page_size kv_heads D", "v_pages qkv num_pages page_size kv_heads D",
    "slots int64 N", check=_check,
)  # fmt: skip
def qk_norm_rope_scatter(
    qkv: Tensor, num_heads: int, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    k_pages: Tensor, v_pages: Tensor, slots: Tensor, values: Values = "plain",
) -> Tensor:  # fmt: skip
    """`qk_norm_rope` that writes keys and values to pages, in place; returns q.

    Row i goes to slot slots[i] = page * page_size + offset [N] int64, all different; negative slots are skipped.
    """
    q, k, v = _turned(qkv, num_heads, q_weight, k_weight, eps, cos, sin, values)
    rows = (slots >= 0).nonzero().squeeze(1)
    for pages, fresh in ((k_pages, k), (v_pages, v)):
        pages[slots[rows] // pages.shape[1], slots[rows] % pages.shape[1]] = fresh[rows]
    return q


def _turned(
    qkv: Tensor, num_heads: int, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    values: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    num_kv_heads = kv_heads(qkv, num_heads, values)
    q, k, v = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads], qkv[:, -num_kv_heads:]
    if values != "plain":
        v = rms_norm(v, v.shape[-1:], None, eps)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight.shape, q_weight, eps), rms_norm(k, k_weight.shape, k_weight, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [N, heads, D]; a pair of components is (i, i + D / 2)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
