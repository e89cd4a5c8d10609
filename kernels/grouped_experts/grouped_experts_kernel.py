"""Experts in Triton: sort pairs of row and expert by expert, two grouped products, and a sum."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..device import interpreted, shared_memory
from ..tiles import num_tiles, strided, tile_of

PAIRS = 2048  # that a sorting program reads at a time
COLUMNS = 1024  # of a summing program: 16 bytes a thread of four warps
# Tiles that run together, one block of columns after another: weights are read once, rows stay cached.
GROUP = tl.constexpr(8)


class Tile(NamedTuple):
    """What a program multiplies: rows of an expert, columns, and width at a time; --tune times others."""

    rows: int
    columns: int  # of gates and of ups; of `down` the same
    depth: int
    num_warps: int
    num_stages: int
    down_stages: int = 0  # of the second product, if fewer: two of its programs fit a multiprocessor


def tiles(**options: int) -> dict[int, Tile]:
    """By rows. From 64 rows on products are wgmma (sm_90) or tcgen05 (sm_100)."""
    return {rows: Tile(rows, 64, 64, **{"num_warps": 4, "num_stages": 4} | options) for rows in (16, 32, 64)}


LARGE = Tile(128, 128, 64, num_warps=8, num_stages=4, down_stages=3)
TILES = tiles() | {128: LARGE}
SMALL_TILES = tiles(num_stages=2) | {128: Tile(128, 64, 64, num_warps=8, num_stages=2)}  # of 99 KiB of shared memory
WIDE_TILE = Tile(16, 64, 32, num_warps=4, num_stages=2)  # of fp32


class Sizes(NamedTuple):
    """What a launch of a product is compiled for."""

    experts: int
    top_k: int
    width: int
    ffn: int
    gelu: bool
    rows: int
    columns: int
    depth: int
    widen: bool


def rows_of_a_tile(num_pairs: int, num_experts: int) -> int:
    """Half as many again as an expert's mean rows, rounded up to a tile: it holds the rows of most experts."""
    return next((rows for rows in TILES if 2 * rows * num_experts >= 3 * num_pairs), max(TILES))


def tile_for(x: Tensor, num_pairs: int, num_experts: int) -> Tile:
    """How these products are compiled."""
    if x.element_size() > 2:
        return WIDE_TILE
    rows = rows_of_a_tile(num_pairs, num_experts)
    if 0 < shared_memory(x.device) < 200 * 1024:  # an A100 has 163 KiB, an H200 227
        return SMALL_TILES[rows]
    return TILES[rows]


def grouped_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    tile: Tile | None = None,
) -> Tensor:
    """Never waits for the device, which alone knows each expert's number of rows."""
    (num_rows, top_k), (num_experts, width, ffn) = experts.shape, down.shape
    num_pairs = num_rows * top_k
    tile = tile or tile_for(x, num_pairs, num_experts)
    start = x.new_empty(num_experts + 1, dtype=torch.int32)
    order, place = (x.new_empty(num_pairs, dtype=torch.int32) for _ in range(2))
    inner, read, out = (x.new_empty(shape) for shape in ((num_pairs, ffn), (num_pairs, width), (num_rows, width)))
    if num_experts:
        _sort[(num_experts,)](
            experts.reshape(-1), (start, order, place), num_pairs, num_experts, BLOCK=PAIRS, num_warps=8
        )
    if num_pairs == 0 or width == 0:
        return out
    num = num_tiles(num_pairs, num_experts, tile.rows)
    sizes = Sizes(
        experts=num_experts,
        top_k=top_k,
        width=width,
        ffn=ffn,
        gelu=activation == "gelu",
        rows=tile.rows,
        columns=tile.columns,
        depth=tile.depth,
        widen=interpreted(x),
    )
    if ffn:
        _gate_up[(num * triton.cdiv(ffn, tile.columns),)](
            strided(x),
            strided(gate_up),
            (start, order),
            inner,
            num,
            sizes,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    _down[(num * triton.cdiv(width, tile.columns),)](
        inner,
        strided(down),
        start,
        read,
        num,
        sizes,
        num_warps=tile.num_warps,
        num_stages=tile.down_stages or tile.num_stages,
    )
    _combine[(num_rows, triton.cdiv(width, COLUMNS))](
        read, place, weights.reshape(-1), out, TOP_K=top_k, WIDTH=width, BLOCK=COLUMNS, num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _sort(experts_ptr, outs, num_pairs, num_experts, BLOCK: constexpr):
    """A program an expert: its pairs come after those of earlier experts."""
    start_ptr, order_ptr, place_ptr = outs
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
def _tile(start_ptr, num_tiles, NUM: constexpr, sizes: constexpr):
    """This program's expert, the ends of its pairs, and a block of columns.

    All NUM blocks of columns of GROUP tiles follow each other, tiles first.
    """
    i = tl.program_id(0)
    first = i // (GROUP * NUM) * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    i %= GROUP * NUM
    i_e, _, begin, end = tile_of(start_ptr, sizes.experts, first + i % size, sizes.rows)
    return i_e.to(tl.int64), begin, end, i // size


@triton.jit
def _part(ptr, i_k, WIDTH: constexpr, sizes: constexpr):
    """Rows from column i_k on; zeros beyond the width."""
    o_k = tl.arange(0, sizes.depth)[None, :]
    if WIDTH % sizes.depth == 0:
        b = tl.load(ptr + i_k + o_k)
    else:
        b = tl.load(ptr + i_k + o_k, mask=i_k + o_k < WIDTH, other=0.0)
    if sizes.widen:
        b = b.to(tl.float32)
    return b


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up(x, gate_up, pairs, inner_ptr, num_tiles, sizes: constexpr):
    """The gated input of pairs of one expert: a tile of gates times a tile of ups."""
    i_e, begin, end, i_n = _tile(pairs[0], num_tiles, tl.cdiv(sizes.ffn, sizes.columns), sizes)
    if begin >= end:
        return
    FFN: constexpr = sizes.ffn
    order_ptr = pairs[1]
    o_r = begin + tl.arange(0, sizes.rows)
    o_f = i_n * sizes.columns + tl.arange(0, sizes.columns)
    # Rows beyond the tile and the matrix repeat the last one: their products are not stored.
    b_row = tl.load(order_ptr + tl.minimum(o_r, end - 1)) // sizes.top_k
    x_rows = x.ptr + b_row.to(tl.int64)[:, None] * x.strides[0]
    gates = gate_up.ptr + i_e * gate_up.strides[0] + tl.minimum(o_f, FFN - 1)[:, None] * gate_up.strides[1]
    b_gate = tl.zeros([sizes.rows, sizes.columns], tl.float32)
    b_up = tl.zeros([sizes.rows, sizes.columns], tl.float32)
    for i_k in range(0, sizes.width, sizes.depth):
        b_x = _part(x_rows, i_k, sizes.width, sizes)
        b_of_gate = _part(gates, i_k, sizes.width, sizes)
        b_of_up = _part(gates + FFN * gate_up.strides[1], i_k, sizes.width, sizes)
        b_gate = tl.dot(b_x, tl.trans(b_of_gate), b_gate, input_precision="ieee")
        b_up = tl.dot(b_x, tl.trans(b_of_up), b_up, input_precision="ieee")
    dtype = inner_ptr.dtype.element_ty
    # Round as the reference's steps do.
    b_gate, b_up = b_gate.to(dtype).to(tl.float32), b_up.to(dtype).to(tl.float32)
    b_exponent = b_gate
    if sizes.gelu:  # (1 + tanh z) / 2 is the sigmoid of 2 z
        b_exponent = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    b_open = (b_gate / (1.0 + tl.exp(-b_exponent))).to(dtype).to(tl.float32)
    o_out = o_r.to(tl.int64)[:, None] * FFN + o_f[None, :]
    tl.store(inner_ptr + o_out, (b_open * b_up).to(dtype), mask=(o_r < end)[:, None] & (o_f < FFN)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _down(inner_ptr, down, start_ptr, read_ptr, num_tiles, sizes: constexpr):
    """An expert's output for some of its pairs, in order."""
    i_e, begin, end, i_n = _tile(start_ptr, num_tiles, tl.cdiv(sizes.width, sizes.columns), sizes)
    if begin >= end:
        return
    WIDTH: constexpr = sizes.width
    o_r = begin + tl.arange(0, sizes.rows)
    o_h = i_n * sizes.columns + tl.arange(0, sizes.columns)
    rows = inner_ptr + tl.minimum(o_r, end - 1).to(tl.int64)[:, None] * sizes.ffn
    downs = down.ptr + i_e * down.strides[0] + tl.minimum(o_h, WIDTH - 1)[:, None] * down.strides[1]
    b_out = tl.zeros([sizes.rows, sizes.columns], tl.float32)
    for i_k in range(0, sizes.ffn, sizes.depth):
        b_inner, b_of_down = _part(rows, i_k, sizes.ffn, sizes), _part(downs, i_k, sizes.ffn, sizes)
        b_out = tl.dot(b_inner, tl.trans(b_of_down), b_out, input_precision="ieee")
    o_out = o_r.to(tl.int64)[:, None] * WIDTH + o_h[None, :]
    m = (o_r < end)[:, None] & (o_h < WIDTH)[None, :]
    tl.store(read_ptr + o_out, b_out.to(read_ptr.dtype.element_ty), mask=m)


@triton.jit
def _combine(read_ptr, place_ptr, weights_ptr, out_ptr, TOP_K: constexpr, WIDTH: constexpr, BLOCK: constexpr):
    """Some columns of a row: the weighted sum of its pairs, in order."""
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        place = tl.load(place_ptr + i_row * TOP_K + i).to(tl.int64)
        b_read = tl.load(read_ptr + place * WIDTH + o, mask=o < WIDTH, other=0.0)
        b_sum += b_read.to(tl.float32) * tl.load(weights_ptr + i_row * TOP_K + i)
    tl.store(out_ptr + i_row * WIDTH + o, b_sum.to(out_ptr.dtype.element_ty), mask=o < WIDTH)
