"""Residual sum and RMSNorm in Triton: one program a row, read once."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return sandwich_norm(x, () if added is None else (added,), None, None, None, weight, eps)


def sandwich_norm(
    x: Tensor, parts: Sequence[Tensor], part_weights: Tensor | None, weight: Tensor | None, scale: Tensor | None,
    after: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """weight None: parts are added without a norm."""
    num_rows, width = x.shape
    normed = x.new_empty((num_rows, width))
    total = torch.empty_like(normed) if parts else x
    if normed.numel():
        block = triton.next_power_of_2(width)
        first, second = (*parts, x, x)[:2]
        _add_norm[(num_rows,)](
            x, first, second, after if part_weights is None else part_weights, after if weight is None else weight,
            after if scale is None else scale, after, total, normed, x.stride(0), first.stride(0), second.stride(0),
            width if part_weights is None else part_weights.stride(0), eps,
            WIDTH=width, BLOCK=block, PARTS=len(parts), NORM=weight is not None, SCALE=scale is not None,
            num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return total, normed


@triton.jit
def _normed(b, b_weight, eps, WIDTH: constexpr, dtype: constexpr):
    """b normed and weighted, rounded to dtype, in fp32."""
    return (b * tl.rsqrt(tl.sum(b * b) / WIDTH + eps) * b_weight).to(dtype).to(tl.float32)


@triton.jit
def _add_norm(
    x_ptr, one_ptr, two_ptr, part_weights_ptr, weight_ptr, scale_ptr, after_ptr, total_ptr, normed_ptr,
    x_row, one_row, two_row, part_weights_row, eps,
    WIDTH: constexpr, BLOCK: constexpr, PARTS: constexpr, NORM: constexpr, SCALE: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    m = o < WIDTH
    dtype: constexpr = total_ptr.dtype.element_ty
    if PARTS > 0:
        b_part = tl.load(one_ptr + i_row * one_row + o, mask=m, other=0.0).to(tl.float32)
    if PARTS == 2:
        b_two = tl.load(two_ptr + i_row * two_row + o, mask=m, other=0.0).to(tl.float32)
        b_part = _normed(b_part, tl.load(part_weights_ptr + o, mask=m, other=0.0), eps, WIDTH, dtype)
        b_weight = tl.load(part_weights_ptr + part_weights_row + o, mask=m, other=0.0)
        b_part = (b_part + _normed(b_two, b_weight, eps, WIDTH, dtype)).to(dtype).to(tl.float32)
    if NORM:
        b_part = _normed(b_part, tl.load(weight_ptr + o, mask=m, other=0.0), eps, WIDTH, dtype)
    b = tl.load(x_ptr + i_row * x_row + o, mask=m, other=0.0).to(tl.float32)
    b_after = tl.load(after_ptr + o, mask=m, other=0.0).to(tl.float32)
    if PARTS > 0:
        b = (b + b_part).to(dtype).to(tl.float32)  # as the next sub-layer reads it
        if SCALE:
            b = (b * tl.load(scale_ptr)).to(dtype).to(tl.float32)
        tl.store(total_ptr + i_row * WIDTH + o, b.to(dtype), mask=m)
    tl.store(normed_ptr + i_row * WIDTH + o, _normed(b, b_after, eps, WIDTH, dtype).to(dtype), mask=m)
