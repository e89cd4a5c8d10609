"""Sandwich norm in Triton: one program a row, read once."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


def sandwich_norm(
    x: Tensor, parts: Sequence[Tensor], part_weights: Tensor | None, weight: Tensor, scale: Tensor | None,
    after: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_rows, width = x.shape
    total = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    normed = torch.empty((len(after), num_rows, width), dtype=x.dtype, device=x.device)
    if total.numel():
        block = triton.next_power_of_2(width)
        _sandwich[(num_rows,)](
            x, parts[0], parts[-1], weight if part_weights is None else part_weights, weight,
            weight if scale is None else scale, after, total, normed, num_rows, x.stride(0), parts[0].stride(0),
            parts[-1].stride(0), weight.stride(0) * width if part_weights is None else part_weights.stride(0),
            after.stride(0), eps, WIDTH=width, BLOCK=block, TWO=len(parts) == 2, SCALE=scale is not None,
            K=len(after), num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return total, normed


@triton.jit
def _normed(b, weight_ptr, o, m, eps, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """b normed and weighted, rounded to dtype, in fp32."""
    b_weight = tl.load(weight_ptr + o, mask=m, other=0.0)
    return (b * tl.rsqrt(tl.sum(b * b) / WIDTH + eps) * b_weight).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _sandwich(
    x_ptr, one_ptr, two_ptr, part_weights_ptr, weight_ptr, scale_ptr, after_ptr, total_ptr, normed_ptr, num_rows, x_row,
    one_row, two_row, part_weights_row, after_row, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TWO: tl.constexpr, SCALE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    m = o < WIDTH
    dtype: tl.constexpr = total_ptr.dtype.element_ty
    b_part = tl.load(one_ptr + i_row * one_row + o, mask=m, other=0.0).to(tl.float32)
    if TWO:
        b_two = tl.load(two_ptr + i_row * two_row + o, mask=m, other=0.0).to(tl.float32)
        b_part = _normed(b_part, part_weights_ptr, o, m, eps, WIDTH, dtype)
        b_part += _normed(b_two, part_weights_ptr + part_weights_row, o, m, eps, WIDTH, dtype)
        b_part = b_part.to(dtype).to(tl.float32)
    b = tl.load(x_ptr + i_row * x_row + o, mask=m, other=0.0).to(tl.float32)
    b = (b + _normed(b_part, weight_ptr, o, m, eps, WIDTH, dtype)).to(dtype).to(tl.float32)
    if SCALE:
        b = (b * tl.load(scale_ptr)).to(dtype).to(tl.float32)
    tl.store(total_ptr + i_row * WIDTH + o, b.to(dtype), mask=m)
    for k in tl.static_range(K):
        b_out = _normed(b, after_ptr + k * after_row, o, m, eps, WIDTH, dtype)
        tl.store(normed_ptr + (k * num_rows.to(tl.int64) + i_row) * WIDTH + o, b_out.to(dtype), mask=m)
