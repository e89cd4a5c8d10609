"""From the fused projection to queries and cached keys and values: norm heads and rotate them by position."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from ..operation import operation


class Norms(NamedTuple):
    """Weights [D] of the queries' and the keys' norm; None: no norm."""

    q: Tensor | None
    k: Tensor | None
    eps: float


class Turns(NamedTuple):
    """Cosines and sines of each row's angles, [N, D / 2]."""

    cos: Tensor
    sin: Tensor


class Pages(NamedTuple):
    """Where some rows' keys and values are written."""

    keys: Tensor  # [pages, page_size, kv_heads, head_dim]; so are the values
    values: Tensor
    slots: Tensor  # [rows], page x page_size + offset; negative: not written


def _check(qkv: Tensor, num_heads: int, norms: Norms, pages: Pages, **_: object) -> None:
    heads, head_dim = qkv.shape[1:]
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"qkv has heads of {head_dim}, expected an even number")
    if (norms.q is None) != (norms.k is None):
        raise ValueError("one norm's weight is None, expected both or neither")
    expected = num_heads + 2 * pages.keys.shape[2]
    if heads != expected:
        raise ValueError(f"qkv has {heads} heads, expected {expected}: {num_heads} and twice {pages.keys.shape[2]}")


@operation(
    "qkv float N heads D",
    "norms.q qkv D",
    "norms.k qkv D",
    "turns.cos qkv N half",
    "turns.sin qkv N half",
    "pages.keys qkv num_pages page_size kv_heads D",
    "pages.values qkv num_pages page_size kv_heads D",
    "pages.slots int64 N",
    check=_check,
)
def qk_norm_rope(qkv: Tensor, num_heads: int, norms: Norms, turns: Turns, pages: Pages) -> Tensor:
    """Queries [N, H, D], contiguous and of qkv's dtype; keys and values are written to pages, to different slots.

    Heads of q and k are RMS-normed (Qwen3, SDAR); component i of a head is rotated with i + D / 2 (RoPE).

    qkv [N, H + 2 Hkv, D]: queries, keys and values; num_heads: H. All of one dtype; the arithmetic is in fp32.
    """
    num_kv_heads = pages.keys.shape[2]
    q, k, v = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads], qkv[:, -num_kv_heads:]
    if norms.q is not None and norms.k is not None:
        q = rms_norm(q, norms.q.shape, norms.q, norms.eps)
        k = rms_norm(k, norms.k.shape, norms.k, norms.eps)
    rows = (pages.slots >= 0).nonzero().squeeze(1)
    slots, page_size = pages.slots[rows], pages.keys.shape[1]
    pages.keys[slots // page_size, slots % page_size] = rotate(k, turns)[rows]
    pages.values[slots // page_size, slots % page_size] = v[rows]
    return rotate(q, turns)


def rotate(x: Tensor, turns: Turns) -> Tensor:
    """RoPE on [N, heads, D]; a pair of components is (i, i + D / 2)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = turns.cos[:, None], turns.sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
