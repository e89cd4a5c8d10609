"""Experts in Triton: sort pairs of row and expert by expert, two grouped products, and a sum."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..device import interpreted, shared_memory
from ..tiles import num_tiles, tile_of

PAIRS = 2048  # that a sorting program reads at a time
COLUMNS = 1024  # of a summing program: 16 bytes a thread of four warps
# Tiles that run together, one block of columns after another: weights are read once, rows stay cached.
GROUP = 8


class Tile(NamedTuple):
    """What a program multiplies: rows of an expert, columns, and width at a time; --tune times others."""

    rows: int
    columns: int  # of gates and of ups; of `down` the same
    depth: int
    num_warps: int
    num_stages: int
    tail: int = 0  # rows of a smaller tile for an expert's last rows; 0: none
    down_stages: int = 0  # of the second product, if fewer: two of its programs fit a multiprocessor


# By rows. From 64 rows on products are wgmma (sm_90) or tcgen05 (sm_100).
TILES = {rows: Tile(rows, 64, 64, 4, 4) for rows in (16, 32, 64)} | {128: Tile(128, 128, 64, 8, 4, 32, 3)}
SMALL_TILES = {rows: Tile(rows, 64, 64, 4 if rows < 128 else 8, 2) for rows in TILES}  # of 99 KiB of shared memory
WIDE_TILE = Tile(16, 64, 32, 4, 2)  # of fp32


def rows_of_a_tile(num_pairs: int, num_experts: int) -> int:
    """Half as many again as an expert's mean rows, rounded up to a tile: it holds the rows of most experts."""
    return next((rows for rows in TILES if 2 * rows * num_experts >= 3 * num_pairs), max(TILES))


def tile_for(x: Tensor, num_pairs: int, num_experts: int) -> Tile:
    """How these products are compiled."""
    if x.element_size() > 2:
        return WIDE_TILE
    small = 0 < shared_memory(x.device) < 200 * 1024  # an A100 has 163 KiB, an H200 227
    return (SMALL_TILES if small else TILES)[rows_of_a_tile(num_pairs, num_experts)]


def grouped_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Never waits for the device, which alone knows each expert's number of rows."""
    (num_rows, top_k), (num_experts, width, ffn) = experts.shape, down.shape
    num_pairs = num_rows * top_k
    tile = tile or tile_for(x, num_pairs, num_experts)
    start = x.new_empty(num_experts + 1, dtype=torch.int32)
    order, place = (x.new_empty(num_pairs, dtype=torch.int32) for _ in range(2))
    shapes = (num_pairs, ffn), (num_pairs, width), (num_rows, width)
    inner, read, out = (x.new_empty(shape) for shape in shapes)
    if num_experts:
        _sort[(num_experts,)](
            experts.reshape(-1), start, order, place, num_pairs, num_experts, BLOCK=PAIRS, num_warps=8
        )
    if num_pairs and width:
        num = num_tiles(num_pairs, num_experts, tile.rows)
        shared: dict[str, Any] = {
            "WIDTH": width, "FFN": ffn, "GROUP": GROUP, "BLOCK_R": tile.rows, "TAIL": tile.tail,
            "BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "WIDEN": interpreted(x), "num_warps": tile.num_warps,
        }  # fmt: skip
        if ffn:
            _gate_up[(num * triton.cdiv(ffn, tile.columns),)](
                x, gate_up, start, order, inner, num_experts, num, x.stride(0), gate_up.stride(0), gate_up.stride(1),
                TOP_K=top_k, GELU=activation == "gelu", num_stages=tile.num_stages, **shared,
            )  # fmt: skip
        _down[(num * triton.cdiv(width, tile.columns),)](
            inner, down, start, read, num_experts, num, down.stride(0), down.stride(1),
            num_stages=tile.down_stages or tile.num_stages, **shared,
        )  # fmt: skip
        _combine[(num_rows, triton.cdiv(width, COLUMNS))](
            read, place, weights.reshape(-1), out, TOP_K=top_k, WIDTH=width, BLOCK=COLUMNS, num_warps=4
        )
    return out


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _sort(experts_ptr, start_ptr, order_ptr, place_ptr, num_pairs, num_experts, BLOCK: constexpr):
    """A program an expert: its pairs come after those of earlier experts."""
    i_e = tl.program_id(0)
    start = 0
    for i in tl.range(0, num_pairs, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_expert = tl.load(experts_ptr + o, mask=o < num_pairs, other=num_experts).to(tl.int32)
        start += tl.sum((b_expert < i_e).to(tl.int32))
    tl.store(start_ptr + i_e, start)
    tl.store(start_ptr + num_experts, num_pairs, mask=i_e == num_experts - 1)
    for i in tl.range(0, num_pairs, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_expert = tl.load(experts_ptr + o, mask=o < num_pairs, other=num_experts).to(tl.int32)
        b_own = (b_expert == i_e).to(tl.int32)
        b_place = start + tl.cumsum(b_own, 0) - 1
        tl.store(order_ptr + b_place, o, mask=b_own > 0)
        tl.store(place_ptr + o, b_place, mask=b_own > 0)
        start += tl.sum(b_own)


@triton.jit
def _tile_and_columns(num_tiles, NUM: constexpr, GROUP: constexpr):
    """This program's tile and block of columns: all NUM blocks of GROUP tiles follow each other, tiles first."""
    i = tl.program_id(0)
    first = i // (GROUP * NUM) * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    i %= GROUP * NUM
    return first + i % size, i // size


@triton.jit
def _part(ptr, i_k, o_k, WIDTH: constexpr, EVEN: constexpr, WIDEN: constexpr):
    """Rows from column i_k on; zeros beyond the width."""
    if EVEN:
        b = tl.load(ptr + i_k)
    else:
        b = tl.load(ptr + i_k, mask=(i_k + o_k < WIDTH)[None, :], other=0.0)
    if WIDEN:
        b = b.to(tl.float32)
    return b


@triton.jit(do_not_specialize=["num_experts", "num_tiles"])
def _gate_up(
    x_ptr, gate_up_ptr, start_ptr, order_ptr, inner_ptr, num_experts, num_tiles, x_row, expert_stride, gate_row,
    TOP_K: constexpr, WIDTH: constexpr, FFN: constexpr, GELU: constexpr, GROUP: constexpr,
    BLOCK_R: constexpr, TAIL: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, WIDEN: constexpr,
):  # fmt: skip
    """The gated input of pairs of one expert: a tile of gates times a tile of ups."""
    i_tile, i_n = _tile_and_columns(num_tiles, tl.cdiv(FFN, BLOCK_N), GROUP)
    i_e, _, begin, end = tile_of(start_ptr, num_experts, i_tile, BLOCK_R)
    if begin < end:
        # An expert's last pairs are a smaller tile, if there is one.
        for WHOLE in tl.static_range(0 if TAIL > 0 else 1, 2):
            if end - begin > TAIL if WHOLE else end - begin <= TAIL:
                o_r, o_k = begin + tl.arange(0, BLOCK_R if WHOLE else TAIL), tl.arange(0, BLOCK_K)
                o_f = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
                # Rows beyond the tile and the matrix repeat the last one: their products are not stored.
                b_row = tl.load(order_ptr + tl.minimum(o_r, end - 1)) // TOP_K
                x_rows = x_ptr + b_row.to(tl.int64)[:, None] * x_row + o_k[None, :]
                gates = gate_up_ptr + i_e.to(tl.int64) * expert_stride + tl.minimum(o_f, FFN - 1)[:, None] * gate_row
                gates += o_k[None, :]
                b_gate = tl.zeros([BLOCK_R if WHOLE else TAIL, BLOCK_N], tl.float32)
                b_up = tl.zeros([BLOCK_R if WHOLE else TAIL, BLOCK_N], tl.float32)
                for i_k in range(0, WIDTH, BLOCK_K):
                    b_x = _part(x_rows, i_k, o_k, WIDTH, WIDTH % BLOCK_K == 0, WIDEN)
                    b_of_gate = _part(gates, i_k, o_k, WIDTH, WIDTH % BLOCK_K == 0, WIDEN)
                    b_of_up = _part(gates + FFN * gate_row, i_k, o_k, WIDTH, WIDTH % BLOCK_K == 0, WIDEN)
                    b_gate = tl.dot(b_x, tl.trans(b_of_gate), b_gate, input_precision="ieee")
                    b_up = tl.dot(b_x, tl.trans(b_of_up), b_up, input_precision="ieee")
                dtype = inner_ptr.dtype.element_ty
                # Round as the reference's steps do.
                b_gate, b_up = b_gate.to(dtype).to(tl.float32), b_up.to(dtype).to(tl.float32)
                b_at = b_gate
                if GELU:  # (1 + tanh z) / 2 is the sigmoid of 2 z
                    b_at = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
                b_open = (b_gate / (1.0 + tl.exp(-b_at))).to(dtype).to(tl.float32)
                o_out = o_r.to(tl.int64)[:, None] * FFN + o_f[None, :]
                tl.store(inner_ptr + o_out, (b_open * b_up).to(dtype), mask=(o_r < end)[:, None] & (o_f < FFN)[None, :])


@triton.jit(do_not_specialize=["num_experts", "num_tiles"])
def _down(
    inner_ptr, down_ptr, start_ptr, read_ptr, num_experts, num_tiles, expert_stride, down_row,
    WIDTH: constexpr, FFN: constexpr, GROUP: constexpr, BLOCK_R: constexpr, TAIL: constexpr,
    BLOCK_N: constexpr, BLOCK_K: constexpr, WIDEN: constexpr,
):  # fmt: skip
    """An expert's output for some of its pairs, in order."""
    i_tile, i_n = _tile_and_columns(num_tiles, tl.cdiv(WIDTH, BLOCK_N), GROUP)
    i_e, _, begin, end = tile_of(start_ptr, num_experts, i_tile, BLOCK_R)
    if begin < end:
        # An expert's last pairs are a smaller tile, if there is one.
        for WHOLE in tl.static_range(0 if TAIL > 0 else 1, 2):
            if end - begin > TAIL if WHOLE else end - begin <= TAIL:
                o_r, o_k = begin + tl.arange(0, BLOCK_R if WHOLE else TAIL), tl.arange(0, BLOCK_K)
                o_h = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
                rows = inner_ptr + tl.minimum(o_r, end - 1).to(tl.int64)[:, None] * FFN + o_k[None, :]
                downs = down_ptr + i_e.to(tl.int64) * expert_stride + tl.minimum(o_h, WIDTH - 1)[:, None] * down_row
                downs += o_k[None, :]
                b_out = tl.zeros([BLOCK_R if WHOLE else TAIL, BLOCK_N], tl.float32)
                for i_k in range(0, FFN, BLOCK_K):
                    b_inner = _part(rows, i_k, o_k, FFN, FFN % BLOCK_K == 0, WIDEN)
                    b_of_down = _part(downs, i_k, o_k, FFN, FFN % BLOCK_K == 0, WIDEN)
                    b_out = tl.dot(b_inner, tl.trans(b_of_down), b_out, input_precision="ieee")
                o_out = o_r.to(tl.int64)[:, None] * WIDTH + o_h[None, :]
                m = (o_r < end)[:, None] & (o_h < WIDTH)[None, :]
                tl.store(read_ptr + o_out, b_out.to(read_ptr.dtype.element_ty), mask=m)


@triton.jit
def _combine(
    read_ptr, place_ptr, weights_ptr, out_ptr, TOP_K: constexpr, WIDTH: constexpr, BLOCK: constexpr
):  # fmt: skip
    """Some columns of a row: the weighted sum of its pairs, in order."""
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        place = tl.load(place_ptr + i_row * TOP_K + i).to(tl.int64)
        b_read = tl.load(read_ptr + place * WIDTH + o, mask=o < WIDTH, other=0.0)
        b_sum += b_read.to(tl.float32) * tl.load(weights_ptr + i_row * TOP_K + i)
    tl.store(out_ptr + i_row * WIDTH + o, b_sum.to(out_ptr.dtype.element_ty), mask=o < WIDTH)
