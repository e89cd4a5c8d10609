"""Experts in Triton: pairs of a row and an expert, in order of the experts, and two grouped matrix products."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import interpreted
from ..tiles import matrix_of, num_tiles, tile_of

BLOCK_R = 16  # pairs of a program: most experts have few rows
BLOCK_N, BLOCK_K = 64, 64  # columns of a program, and what it takes of the width at a time


def grouped_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """Nothing waits for the device, which alone knows the number of rows of each expert."""
    (num_rows, top_k), (num_experts, width, ffn) = experts.shape, down.shape
    num_pairs = num_rows * top_k
    out = torch.empty((num_pairs, width), dtype=torch.float32, device=x.device)
    if num_pairs and width:
        of_pair, order = experts.reshape(-1).sort(stable=True)
        start = torch.searchsorted(of_pair, torch.arange(num_experts + 1, device=x.device)).int()
        inner = torch.empty((num_pairs, ffn), dtype=x.dtype, device=x.device)
        tiles = num_tiles(num_pairs, num_experts, BLOCK_R)
        shared = {"BLOCK_R": BLOCK_R, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "WIDEN": interpreted(x)}
        if ffn:
            _gate_up[(tiles, triton.cdiv(ffn, BLOCK_N))](
                x, gate_up, start, order, inner, num_experts, x.stride(0), gate_up.stride(0), gate_up.stride(1),
                TOP_K=top_k, WIDTH=width, FFN=ffn, GELU=activation == "gelu", **shared,
            )  # fmt: skip
        _down[(tiles, triton.cdiv(width, BLOCK_N))](
            inner, down, start, order, weights.reshape(-1), out, num_experts, down.stride(0), down.stride(1),
            WIDTH=width, FFN=ffn, **shared,
        )  # fmt: skip
    return out.view(num_rows, top_k, width).sum(1).to(x.dtype)


@triton.jit(do_not_specialize=["num_experts"])
def _gate_up(
    x_ptr, gate_up_ptr, start_ptr, order_ptr, inner_ptr, num_experts, x_row, expert_stride, gate_row,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, FFN: tl.constexpr, GELU: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The gated input of some pairs of one expert: a tile of gates times one of what they let through."""
    i_e, _, begin, end = tile_of(start_ptr, num_experts, tl.program_id(0), BLOCK_R)
    if begin < end:
        o_r = begin + tl.arange(0, BLOCK_R)
        o_f = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        m_r, m_f = o_r < end, o_f < FFN
        b_row = tl.load(order_ptr + o_r, mask=m_r, other=0) // TOP_K
        gate_up_ptr += i_e.to(tl.int64) * expert_stride
        b_gate = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
        b_up = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
        for i_k in range(0, WIDTH, BLOCK_K):
            o_k = i_k + tl.arange(0, BLOCK_K)
            m_k = o_k < WIDTH
            b_x = matrix_of(x_ptr, b_row, m_r, x_row, o_k, m_k, WIDEN)
            b_of_gate = matrix_of(gate_up_ptr, o_f, m_f, gate_row, o_k, m_k, WIDEN)
            b_of_up = matrix_of(gate_up_ptr + FFN * gate_row, o_f, m_f, gate_row, o_k, m_k, WIDEN)
            b_gate = tl.dot(b_x, tl.trans(b_of_gate), b_gate, input_precision="ieee")
            b_up = tl.dot(b_x, tl.trans(b_of_up), b_up, input_precision="ieee")
        dtype = inner_ptr.dtype.element_ty
        # Rounded between the reference's steps.
        b_gate, b_up = b_gate.to(dtype).to(tl.float32), b_up.to(dtype).to(tl.float32)
        b_at = b_gate
        if GELU:  # (1 + tanh z) / 2 is the sigmoid of 2 z
            b_at = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
        b_open = (b_gate / (1.0 + tl.exp(-b_at))).to(dtype).to(tl.float32)
        o_out = o_r.to(tl.int64)[:, None] * FFN + o_f[None, :]
        tl.store(inner_ptr + o_out, (b_open * b_up).to(dtype), mask=m_r[:, None] & m_f[None, :])


@triton.jit(do_not_specialize=["num_experts"])
def _down(
    inner_ptr, down_ptr, start_ptr, order_ptr, weights_ptr, out_ptr, num_experts, expert_stride, down_row,
    WIDTH: tl.constexpr, FFN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """An expert's weighted output for some of its pairs, stored by pair."""
    i_e, _, begin, end = tile_of(start_ptr, num_experts, tl.program_id(0), BLOCK_R)
    if begin < end:
        o_r = begin + tl.arange(0, BLOCK_R)
        o_h = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        m_r, m_h = o_r < end, o_h < WIDTH
        b_pair = tl.load(order_ptr + o_r, mask=m_r, other=0)
        down_ptr += i_e.to(tl.int64) * expert_stride
        b_out = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
        for i_k in range(0, FFN, BLOCK_K):
            o_k = i_k + tl.arange(0, BLOCK_K)
            b_inner = matrix_of(inner_ptr, o_r, m_r, FFN, o_k, o_k < FFN, WIDEN)
            b_of_down = matrix_of(down_ptr, o_h, m_h, down_row, o_k, o_k < FFN, WIDEN)
            b_out = tl.dot(b_inner, tl.trans(b_of_down), b_out, input_precision="ieee")
        b_weight = tl.load(weights_ptr + b_pair, mask=m_r, other=0.0)
        # Rounded as the reference's product is.
        b_out = b_out.to(inner_ptr.dtype.element_ty).to(tl.float32) * b_weight[:, None]
        tl.store(out_ptr + b_pair[:, None] * WIDTH + o_h[None, :], b_out, mask=m_r[:, None] & m_h[None, :])
