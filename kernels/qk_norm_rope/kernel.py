"""Queries and keys normed and turned, values moved, in Triton: a program for some heads of a row, read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 1024  # of each half of the heads of a program: 16 bytes a thread of four warps


def qk_norm_rope(
    qkv: Tensor, num_heads: int, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, heads, head_dim = qkv.shape
    num_kv_heads = (heads - num_heads) // 2
    q, k, v = (
        torch.empty((num_rows, n, head_dim), dtype=qkv.dtype, device=qkv.device)
        for n in (num_heads, num_kv_heads, num_kv_heads)
    )
    if num_rows:
        block_d = triton.next_power_of_2(head_dim // 2)
        block_h = max(1, NUMBERS // block_d)
        _norm_rope[(num_rows, triton.cdiv(heads, block_h))](
            qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, cos, sin, q, k, v,
            qkv.stride(0), qkv.stride(1), cos.stride(0), sin.stride(0), eps,
            H=num_heads, HKV=num_kv_heads, D=head_dim, HALF=head_dim // 2, BLOCK_H=block_h,
            BLOCK_D=block_d, NORM=q_weight is not None, num_warps=4,
        )  # fmt: skip
    return q, k, v


@triton.jit
def _norm_rope(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, qkv_row, qkv_head, cos_row, sin_row,
    eps,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < HALF)[None, :]
    is_q = (o_h < H)[:, None]
    is_k = ((o_h >= H) & (o_h < H + HKV))[:, None]
    is_v = ((o_h >= H + HKV) & (o_h < H + 2 * HKV))[:, None]
    m = m_d & (o_h < H + 2 * HKV)[:, None]
    qkv_ptr += i_row * qkv_row + o_h[:, None] * qkv_head + o_d[None, :]
    b_low = tl.load(qkv_ptr, mask=m, other=0.0)
    b_high = tl.load(qkv_ptr + HALF, mask=m, other=0.0)
    o_v = (i_row * HKV + o_h[:, None] - H - HKV) * D + o_d[None, :]
    tl.store(v_ptr + o_v, b_low, mask=m & is_v)
    tl.store(v_ptr + o_v + HALF, b_high, mask=m & is_v)
    dtype = b_low.dtype
    b_low, b_high = b_low.to(tl.float32), b_high.to(tl.float32)
    if NORM:
        b_scale = tl.rsqrt((tl.sum(b_low * b_low, 1) + tl.sum(b_high * b_high, 1)) / D + eps)[:, None]
        m_w = o_d < HALF
        b_low_q = tl.load(q_weight_ptr + o_d, mask=m_w, other=0.0).to(tl.float32)[None, :]
        b_low_k = tl.load(k_weight_ptr + o_d, mask=m_w, other=0.0).to(tl.float32)[None, :]
        b_high_q = tl.load(q_weight_ptr + HALF + o_d, mask=m_w, other=0.0).to(tl.float32)[None, :]
        b_high_k = tl.load(k_weight_ptr + HALF + o_d, mask=m_w, other=0.0).to(tl.float32)[None, :]
        # Rounded as a separate norm would round them.
        b_low = (b_low * b_scale * tl.where(is_q, b_low_q, b_low_k)).to(dtype).to(tl.float32)
        b_high = (b_high * b_scale * tl.where(is_q, b_high_q, b_high_k)).to(dtype).to(tl.float32)
    b_cos = tl.load(cos_ptr + i_row * cos_row + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)[None, :]
    b_sin = tl.load(sin_ptr + i_row * sin_row + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)[None, :]
    b_first = (b_low * b_cos - b_high * b_sin).to(dtype)
    b_second = (b_high * b_cos + b_low * b_sin).to(dtype)
    o_q = (i_row * H + o_h[:, None]) * D + o_d[None, :]
    tl.store(q_ptr + o_q, b_first, mask=m & is_q)
    tl.store(q_ptr + o_q + HALF, b_second, mask=m & is_q)
    o_k = (i_row * HKV + o_h[:, None] - H) * D + o_d[None, :]
    tl.store(k_ptr + o_k, b_first, mask=m & is_k)
    tl.store(k_ptr + o_k + HALF, b_second, mask=m & is_k)
