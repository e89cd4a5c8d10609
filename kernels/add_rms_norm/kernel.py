"""Residual sum and RMSNorm in Triton: one program a row, read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape
    normed = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    total = x if added is None else torch.empty_like(normed)
    if normed.numel():
        block = triton.next_power_of_2(width)
        given = x if added is None else added
        _add_norm[(num_rows,)](
            x, given, weight, total, normed, x.stride(0), given.stride(0), eps,
            WIDTH=width, BLOCK=block, ADD=added is not None, num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return total, normed


@triton.jit
def _add_norm(
    x_ptr, added_ptr, weight_ptr, total_ptr, normed_ptr, x_row, added_row, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    m = o < WIDTH
    b_x = tl.load(x_ptr + i_row * x_row + o, mask=m, other=0.0).to(tl.float32)
    b_weight = tl.load(weight_ptr + o, mask=m, other=0.0).to(tl.float32)
    if ADD:
        b_x += tl.load(added_ptr + i_row * added_row + o, mask=m, other=0.0).to(tl.float32)
        b_total = b_x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + i_row * WIDTH + o, b_total, mask=m)
        b_x = b_total.to(tl.float32)  # as the next sub-layer reads it
    scale = tl.rsqrt(tl.sum(b_x * b_x) / WIDTH + eps)
    tl.store(normed_ptr + i_row * WIDTH + o, (b_x * scale * b_weight).to(normed_ptr.dtype.element_ty), mask=m)
