"""SwiGLU's gate in Triton: one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns of a program


def swiglu(gate_up: Tensor) -> Tensor:
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _gate[(num_rows, triton.cdiv(width, BLOCK))](gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=BLOCK)
    return out


@triton.jit
def _gate(gate_up_ptr, out_ptr, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < WIDTH
    b_gate = tl.load(gate_up_ptr + i_row * row + o, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(gate_up_ptr + i_row * row + WIDTH + o, mask=m, other=0.0)
    b_open = (b_gate / (1.0 + tl.exp(-b_gate))).to(b_up.dtype)  # rounded between the reference's two steps
    tl.store(out_ptr + i_row * WIDTH + o, (b_open.to(tl.float32) * b_up.to(tl.float32)).to(b_up.dtype), mask=m)
