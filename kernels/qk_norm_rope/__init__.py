"""From the fused projection to queries, keys and values: norm heads and rotate them by position."""

from typing import Literal

import torch
from torch import Tensor

from .. import run
from ..checks import FLOATS, check_tensor
from . import reference

Values = Literal["plain", "normed", "keys"]


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
    _check(qkv, num_heads, q_weight, k_weight, cos, sin, values)
    return run(reference.qk_norm_rope, qkv, qkv, num_heads, q_weight, k_weight, eps, cos, sin, values)


def qk_norm_rope_scatter(
    qkv: Tensor, num_heads: int, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    k_pages: Tensor, v_pages: Tensor, slots: Tensor, values: Values = "plain",
) -> Tensor:  # fmt: skip
    """`qk_norm_rope` that writes keys and values to pages, in place; returns q.

    Row i goes to slot slots[i] = page * page_size + offset [N] int64, all different; negative slots are skipped.
    """
    num_kv_heads = _check(qkv, num_heads, q_weight, k_weight, cos, sin, values)
    check_tensor("k_pages", k_pages, qkv.device, qkv.dtype, "num_pages", "page_size", num_kv_heads, qkv.shape[2])
    check_tensor("v_pages", v_pages, qkv.device, qkv.dtype, *k_pages.shape)
    check_tensor("slots", slots, qkv.device, torch.int64, len(qkv))
    heads = (qkv, num_heads, q_weight, k_weight, eps, cos, sin)
    return run(reference.qk_norm_rope_scatter, qkv, *heads, k_pages, v_pages, slots, values)


def _check(
    qkv: Tensor, num_heads: int, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    values: Values,
) -> int:  # fmt: skip
    """The number of KV heads."""
    check_tensor("qkv", qkv, qkv.device, FLOATS, "N", "heads", "D")
    num_rows, heads, head_dim = qkv.shape
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
    check_tensor("cos", cos, qkv.device, qkv.dtype, num_rows, head_dim // 2)
    check_tensor("sin", sin, qkv.device, qkv.dtype, num_rows, head_dim // 2)
    if q_weight is not None and k_weight is not None:
        check_tensor("q_weight", q_weight, qkv.device, qkv.dtype, head_dim)
        check_tensor("k_weight", k_weight, qkv.device, qkv.dtype, head_dim)
    return (heads - num_heads) // (1 if values == "keys" else 2)
