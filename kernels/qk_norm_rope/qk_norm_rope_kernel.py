"""Norm and RoPE in Triton, to pages: a program for some heads of a row."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..tiles import strided
from . import Norms, Pages, Turns

NUMBERS = 1024  # of each half of a program's heads: 16 bytes a thread of four warps


class Sizes(NamedTuple):
    """What a launch is compiled for."""

    heads: int
    kv_heads: int
    half: int  # of a head
    page: int
    block_heads: int
    block_half: int
    eps: float
    norm: bool


def qk_norm_rope(qkv: Tensor, num_heads: int, norms: Norms, turns: Turns, pages: Pages) -> Tensor:
    num_rows, heads, head_dim = qkv.shape
    q = qkv.new_empty((num_rows, num_heads, head_dim))
    if num_rows == 0:
        return q
    block_half = triton.next_power_of_2(head_dim // 2)
    block_heads = max(1, NUMBERS // block_half)
    sizes = Sizes(
        heads=num_heads,
        kv_heads=pages.keys.shape[2],
        half=head_dim // 2,
        page=pages.keys.shape[1],
        block_heads=block_heads,
        block_half=block_half,
        eps=norms.eps,
        norm=norms.q is not None,
    )
    _norm_rope[(num_rows, triton.cdiv(heads, block_heads))](
        strided(qkv),
        (norms.q, norms.k),
        (strided(turns.cos), strided(turns.sin)),
        q,
        (strided(pages.keys), strided(pages.values), pages.slots),
        sizes,
        num_warps=4,
    )
    return q


@triton.jit
def _norm_rope(qkv, weights, turns, q_ptr, pages, sizes: constexpr):
    H: constexpr = sizes.heads
    HKV: constexpr = sizes.kv_heads
    HALF: constexpr = sizes.half
    cos, sin = turns
    k, v, slots_ptr = pages
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * sizes.block_heads + tl.arange(0, sizes.block_heads)
    slot = tl.load(slots_ptr + i_row)
    page, i_slot = slot // sizes.page, slot % sizes.page
    m_slot = (o_h * 0 + slot >= 0)[:, None]  # negative: the row's keys and values are not written
    o_d = tl.arange(0, sizes.block_half)
    is_q = (o_h < H)[:, None]
    is_k = ((o_h >= H) & (o_h < H + HKV))[:, None]
    m = (o_d < HALF)[None, :] & (o_h < H + 2 * HKV)[:, None]
    qkv_ptr = qkv.ptr + i_row * qkv.strides[0] + o_h[:, None] * qkv.strides[1] + o_d[None, :]
    b_low = tl.load(qkv_ptr, mask=m, other=0.0)
    b_high = tl.load(qkv_ptr + HALF, mask=m, other=0.0)
    p_v = v.ptr + page * v.strides[0] + i_slot * v.strides[1] + (o_h[:, None] - H - HKV) * v.strides[2] + o_d[None, :]
    m_v = m & (o_h >= H + HKV)[:, None] & m_slot
    tl.store(p_v, b_low, mask=m_v)
    tl.store(p_v + HALF, b_high, mask=m_v)
    dtype = b_low.dtype
    b_low, b_high = b_low.to(tl.float32), b_high.to(tl.float32)
    m_d = o_d < HALF
    if sizes.norm:
        q_weight_ptr, k_weight_ptr = weights
        b_square = tl.sum(b_low * b_low, 1) + tl.sum(b_high * b_high, 1)
        b_scale = tl.rsqrt(b_square / (2 * HALF) + sizes.eps)[:, None]
        b_low_q = tl.load(q_weight_ptr + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
        b_low_k = tl.load(k_weight_ptr + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
        b_high_q = tl.load(q_weight_ptr + HALF + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
        b_high_k = tl.load(k_weight_ptr + HALF + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
        # Round as a separate norm would.
        b_low = (b_low * b_scale * tl.where(is_q, b_low_q, b_low_k)).to(dtype).to(tl.float32)
        b_high = (b_high * b_scale * tl.where(is_q, b_high_q, b_high_k)).to(dtype).to(tl.float32)
    b_cos = tl.load(cos.ptr + i_row * cos.strides[0] + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    b_sin = tl.load(sin.ptr + i_row * sin.strides[0] + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    b_first = (b_low * b_cos - b_high * b_sin).to(dtype)
    b_second = (b_high * b_cos + b_low * b_sin).to(dtype)
    p_q = q_ptr + (i_row * H + o_h[:, None]) * (2 * HALF) + o_d[None, :]
    tl.store(p_q, b_first, mask=m & is_q)
    tl.store(p_q + HALF, b_second, mask=m & is_q)
    p_k = k.ptr + page * k.strides[0] + i_slot * k.strides[1] + (o_h[:, None] - H) * k.strides[2] + o_d[None, :]
    m_k = m & is_k & m_slot
    tl.store(p_k, b_first, mask=m_k)
    tl.store(p_k + HALF, b_second, mask=m_k)
