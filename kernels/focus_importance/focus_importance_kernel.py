"""FOCUS's importance in Triton: row sums, then column sums, without atomics."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..device import interpreted
from ..tiles import matrix_of, num_tiles, strided, tile_of

BLOCK = tl.constexpr(32)  # masked tokens at a time, as queries and keys


class Sizes(NamedTuple):
    """What a launch is compiled for."""

    group: int  # heads of queries for one of keys
    head_dim: int
    width: int  # of a head, padded
    scale: float  # in base 2
    widen: bool


def focus_importance(q: Tensor, k: Tensor, masked: Tensor, masked_start: Tensor) -> Tensor:
    num_heads, head_dim = q.shape[1:]
    num_masked, num_sequences = len(masked), len(masked_start) - 1
    lse = q.new_empty((num_heads, num_masked), dtype=torch.float32)
    columns = q.new_empty((num_heads, num_masked), dtype=torch.float32)
    if num_masked == 0:
        return columns.sum(0)
    sizes = Sizes(
        group=num_heads // k.shape[1],
        head_dim=head_dim,
        width=max(16, triton.next_power_of_2(head_dim)),
        scale=head_dim**-0.5 * 1.4426950408889634,
        widen=interpreted(q),
    )
    inputs = strided(q), strided(k), (masked, masked_start), num_masked, num_sequences
    grid = (num_tiles(num_masked, num_sequences, BLOCK.value), num_heads)
    _row_sums[grid](*inputs, lse, sizes)
    _column_sums[grid](*inputs, (lse, columns), sizes)
    return columns.sum(0)


@triton.jit
def _rows(x_ptr, masked_ptr, o, span, row, sizes: constexpr):
    """Vectors of entries of a sequence's list of masked tokens; zeros beyond its ends."""
    m = (o >= span[0]) & (o < span[1])
    o_row = tl.load(masked_ptr + o, mask=m, other=0)
    return matrix_of(x_ptr, o_row, m, row, sizes.head_dim, sizes.width, sizes.widen)


@triton.jit
def _pooled(b_q, k, masked_ptr, o_key, i_head, span, sizes: constexpr):
    """Scores of queries on keys, each the maximum of the key and its list neighbours; -inf beyond the ends."""
    k_ptr = k.ptr + (i_head // sizes.group) * k.strides[1]
    b_pooled = tl.full([b_q.shape[0], o_key.shape[0]], float("-inf"), tl.float32)
    for i in tl.static_range(3):
        o = o_key + (i - 1)
        b_k = _rows(k_ptr, masked_ptr, o, span, k.strides[0], sizes)
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * sizes.scale
        m = (o >= span[0]) & (o < span[1])
        b_pooled = tl.maximum(b_pooled, tl.where(m[None, :], b_score, float("-inf")))
    return tl.where((o_key < span[1])[None, :], b_pooled, float("-inf"))


@triton.jit(do_not_specialize=["num_masked", "num_sequences"])
def _row_sums(q, k, masked, num_masked, num_sequences, lse_ptr, sizes: constexpr):
    """The base-2 log of each query's sum of exponentials, for one head and a tile of queries."""
    masked_ptr, start_ptr = masked
    i_head = tl.program_id(1)
    _, start, first, end = tile_of(start_ptr, num_sequences, tl.program_id(0), BLOCK)
    if first >= end:
        return
    span = start, end
    o_query = first + tl.arange(0, BLOCK)
    b_q = _rows(q.ptr + i_head * q.strides[1], masked_ptr, o_query, span, q.strides[0], sizes)
    b_max = tl.full([BLOCK], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_key in range(start, end, BLOCK):
        b_score = _pooled(b_q, k, masked_ptr, i_key + tl.arange(0, BLOCK), i_head, span, sizes)
        b_new = tl.maximum(b_max, tl.max(b_score, 1))
        b_sum = b_sum * tl.exp2(b_max - b_new) + tl.sum(tl.exp2(b_score - b_new[:, None]), 1)
        b_max = b_new
    tl.store(lse_ptr + i_head.to(tl.int64) * num_masked + o_query, b_max + tl.log2(b_sum), mask=o_query < end)


@triton.jit(do_not_specialize=["num_masked", "num_sequences"])
def _column_sums(q, k, masked, num_masked, num_sequences, sums, sizes: constexpr):
    """The attention that a tile of keys gets from all queries of its sequence, for one head."""
    lse_ptr, columns_ptr = sums
    masked_ptr, start_ptr = masked
    i_head = tl.program_id(1)
    _, start, first, end = tile_of(start_ptr, num_sequences, tl.program_id(0), BLOCK)
    if first >= end:
        return
    span = start, end
    o_key = first + tl.arange(0, BLOCK)
    o_head = i_head.to(tl.int64) * num_masked
    b_drawn = tl.zeros([BLOCK], tl.float32)
    for i_query in range(start, end, BLOCK):
        o_query = i_query + tl.arange(0, BLOCK)
        b_q = _rows(q.ptr + i_head * q.strides[1], masked_ptr, o_query, span, q.strides[0], sizes)
        b_lse = tl.load(lse_ptr + o_head + o_query, mask=o_query < end, other=float("inf"))
        b_score = _pooled(b_q, k, masked_ptr, o_key, i_head, span, sizes)
        b_drawn += tl.sum(tl.exp2(b_score - b_lse[:, None]), 0)
    tl.store(columns_ptr + o_head + o_key, b_drawn, mask=o_key < end)
