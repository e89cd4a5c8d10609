"""SwiGLU's gate in Triton: one pass."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

BLOCK = 1024  # columns of a program


def swiglu(gate_up: Tensor, activation: str) -> Tensor:
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((num_rows, width))
    if out.numel():
        _gate[(num_rows, triton.cdiv(width, BLOCK))](
            gate_up, out, gate_up.stride(0), WIDTH=width, GELU=activation == "gelu", BLOCK=BLOCK
        )
    return out


@triton.jit
def _gate(gate_up_ptr, out_ptr, row, WIDTH: constexpr, GELU: constexpr, BLOCK: constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < WIDTH
    b_gate = tl.load(gate_up_ptr + i_row * row + o, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(gate_up_ptr + i_row * row + WIDTH + o, mask=m, other=0.0)
    b_at = b_gate
    if GELU:  # (1 + tanh z) / 2 is the sigmoid of 2 z
        b_at = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    b_open = (b_gate / (1.0 + tl.exp(-b_at))).to(b_up.dtype)  # round as the reference's steps do
    tl.store(out_ptr + i_row * WIDTH + o, (b_open.to(tl.float32) * b_up.to(tl.float32)).to(b_up.dtype), mask=m)
