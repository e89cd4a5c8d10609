"""Norm and RoPE in Triton, to rows or pages: a program for some heads of a row."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from . import kv_heads

NUMBERS = 1024  # of each half of a program's heads: 16 bytes a thread of four warps


def qk_norm_rope(qkv: Tensor, num_heads: int, values: str, **heads: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = len(qkv), 1, kv_heads(qkv, num_heads, values), qkv.shape[2]
    k, v = (qkv.new_empty(shape) for _ in range(2))
    # A page of one slot for each row, in order.
    q = qk_norm_rope_scatter(qkv, num_heads, values=values, k_pages=k, v_pages=v, slots=None, **heads)
    return q, k.squeeze(1), v.squeeze(1)


def qk_norm_rope_scatter(
    qkv: Tensor, num_heads: int, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    k_pages: Tensor, v_pages: Tensor, slots: Tensor | None, values: str,
) -> Tensor:  # fmt: skip
    num_rows, heads, head_dim = qkv.shape
    q = qkv.new_empty((num_rows, num_heads, head_dim))
    if num_rows:
        block_d = triton.next_power_of_2(head_dim // 2)
        block_h = max(1, NUMBERS // block_d)
        _norm_rope[(num_rows, triton.cdiv(heads, block_h))](
            qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, cos, sin, q,
            k_pages, v_pages, qkv if slots is None else slots, *qkv.stride()[:2], cos.stride(0),
            sin.stride(0), *k_pages.stride()[:3], *v_pages.stride()[:3], eps,
            H=num_heads, HKV=k_pages.shape[2], D=head_dim, HALF=head_dim // 2, PAGE=k_pages.shape[1],
            BLOCK_H=block_h, BLOCK_D=block_d, NORM=q_weight is not None, SCATTER=slots is not None,
            NORM_V=values == "normed", KEYS=values == "keys", num_warps=4,
        )  # fmt: skip
    return q


@triton.jit
def _norm_rope(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, slots_ptr,
    qkv_row, qkv_head, cos_row, sin_row, k_page, k_slot, k_head, v_page, v_slot, v_head, eps,
    H: constexpr, HKV: constexpr, D: constexpr, HALF: constexpr, PAGE: constexpr,
    BLOCK_H: constexpr, BLOCK_D: constexpr, NORM: constexpr, SCATTER: constexpr,
    NORM_V: constexpr, KEYS: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    slot = i_row
    if SCATTER:
        slot = tl.load(slots_ptr + i_row)
    m_slot = (o_h * 0 + slot >= 0)[:, None]  # negative: the row's keys and values are not written
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < HALF)[None, :]
    is_q = (o_h < H)[:, None]
    is_k = ((o_h >= H) & (o_h < H + HKV))[:, None]
    is_v = is_k if KEYS else ((o_h >= H + HKV) & (o_h < H + 2 * HKV))[:, None]
    m = m_d & (o_h < H + (1 if KEYS else 2) * HKV)[:, None]
    qkv_ptr += i_row * qkv_row + o_h[:, None] * qkv_head + o_d[None, :]
    b_low = tl.load(qkv_ptr, mask=m, other=0.0)
    b_high = tl.load(qkv_ptr + HALF, mask=m, other=0.0)
    o_v = (
        slot // PAGE * v_page + slot % PAGE * v_slot + (o_h[:, None] - H - (0 if KEYS else HKV)) * v_head + o_d[None, :]
    )
    m_v = m & is_v & m_slot
    if not (NORM_V or KEYS):
        tl.store(v_ptr + o_v, b_low, mask=m_v)
        tl.store(v_ptr + o_v + HALF, b_high, mask=m_v)
    dtype = b_low.dtype
    b_low, b_high = b_low.to(tl.float32), b_high.to(tl.float32)
    if NORM:
        b_scale = tl.rsqrt((tl.sum(b_low * b_low, 1) + tl.sum(b_high * b_high, 1)) / D + eps)[:, None]
        if NORM_V or KEYS:
            tl.store(v_ptr + o_v, (b_low * b_scale).to(dtype), mask=m_v)
            tl.store(v_ptr + o_v + HALF, (b_high * b_scale).to(dtype), mask=m_v)
        m_w = o_d < HALF
        b_low_q = tl.load(q_weight_ptr + o_d, mask=m_w, other=0.0).to(tl.float32)[None, :]
        b_low_k = tl.load(k_weight_ptr + o_d, mask=m_w, other=0.0).to(tl.float32)[None, :]
        b_high_q = tl.load(q_weight_ptr + HALF + o_d, mask=m_w, other=0.0).to(tl.float32)[None, :]
        b_high_k = tl.load(k_weight_ptr + HALF + o_d, mask=m_w, other=0.0).to(tl.float32)[None, :]
        # Round as a separate norm would.
        b_low = (b_low * b_scale * tl.where(is_q, b_low_q, b_low_k)).to(dtype).to(tl.float32)
        b_high = (b_high * b_scale * tl.where(is_q, b_high_q, b_high_k)).to(dtype).to(tl.float32)
    b_cos = tl.load(cos_ptr + i_row * cos_row + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)[None, :]
    b_sin = tl.load(sin_ptr + i_row * sin_row + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)[None, :]
    b_first = (b_low * b_cos - b_high * b_sin).to(dtype)
    b_second = (b_high * b_cos + b_low * b_sin).to(dtype)
    o_q = (i_row * H + o_h[:, None]) * D + o_d[None, :]
    tl.store(q_ptr + o_q, b_first, mask=m & is_q)
    tl.store(q_ptr + o_q + HALF, b_second, mask=m & is_q)
    o_k = slot // PAGE * k_page + slot % PAGE * k_slot + (o_h[:, None] - H) * k_head + o_d[None, :]
    m_k = m & is_k & m_slot
    tl.store(k_ptr + o_k, b_first, mask=m_k)
    tl.store(k_ptr + o_k + HALF, b_second, mask=m_k)
