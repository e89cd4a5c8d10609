"""FOCUS's importance in Triton: row sums, then column sums, without atomics."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..device import interpreted
from ..tiles import num_tiles, rows_of, tile_of

BLOCK = 32  # masked tokens at a time, as queries and keys
BLOCK_SUM = 256


def focus_importance(q: Tensor, k: Tensor, masked: Tensor, masked_start: Tensor) -> Tensor:
    num_heads, head_dim = q.shape[1:]
    num_masked, num_sequences = len(masked), len(masked_start) - 1
    lse = q.new_empty((num_heads, num_masked), dtype=torch.float32)
    columns = q.new_empty((num_heads, num_masked), dtype=torch.float32)
    importance = q.new_empty(num_masked, dtype=torch.float32)
    if num_masked == 0:
        return importance
    for kernel, lse_or_columns in ((_row_sums, (lse,)), (_column_sums, (lse, columns))):
        kernel[(num_tiles(num_masked, num_sequences, BLOCK), num_heads)](
            q, k, masked, masked_start, *lse_or_columns, head_dim**-0.5 * 1.4426950408889634, num_masked, num_sequences,
            *q.stride()[:2], *k.stride()[:2],
            G=num_heads // k.shape[1], D=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK=BLOCK, WIDEN=interpreted(q),
        )  # fmt: skip
    _head_sums[(triton.cdiv(num_masked, BLOCK_SUM),)](columns, importance, num_masked, num_heads, BLOCK=BLOCK_SUM)
    return importance


@triton.jit
def _rows(x_ptr, masked_ptr, o, start, end, row, D: constexpr, BLOCK_D: constexpr, WIDEN: constexpr):
    """Vectors of entries of a sequence's list of masked tokens; zeros beyond its ends."""
    m = (o >= start) & (o < end)
    return rows_of(x_ptr, tl.load(masked_ptr + o, mask=m, other=0), m, row, D, BLOCK_D, WIDEN)


@triton.jit
def _pooled(
    b_q, k_ptr, masked_ptr, o_key, start, end, k_row, scale,
    D: constexpr, BLOCK_D: constexpr, WIDEN: constexpr,
):  # fmt: skip
    """Scores of queries on keys, each the maximum of the key and its list neighbours; -inf beyond the ends."""
    b_pooled = tl.full([b_q.shape[0], o_key.shape[0]], float("-inf"), tl.float32)
    for i in tl.static_range(3):
        o = o_key + (i - 1)
        b_k = _rows(k_ptr, masked_ptr, o, start, end, k_row, D, BLOCK_D, WIDEN)
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        b_pooled = tl.maximum(b_pooled, tl.where(((o >= start) & (o < end))[None, :], b_score, float("-inf")))
    return tl.where((o_key < end)[None, :], b_pooled, float("-inf"))


@triton.jit(do_not_specialize=["num_masked", "num_sequences"])
def _row_sums(
    q_ptr, k_ptr, masked_ptr, start_ptr, lse_ptr, scale, num_masked, num_sequences, q_row, q_head, k_row, k_head,
    G: constexpr, D: constexpr, BLOCK_D: constexpr, BLOCK: constexpr,
    WIDEN: constexpr,
):  # fmt: skip
    """The base-2 log of each query's sum of exponentials, for one head and a tile of queries."""
    i_head = tl.program_id(1)
    _, start, first, end = tile_of(start_ptr, num_sequences, tl.program_id(0), BLOCK)
    if first >= end:
        return
    o_query = first + tl.arange(0, BLOCK)
    b_q = _rows(q_ptr + i_head * q_head, masked_ptr, o_query, start, end, q_row, D, BLOCK_D, WIDEN)
    b_max = tl.full([BLOCK], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_key in range(start, end, BLOCK):
        o_key = i_key + tl.arange(0, BLOCK)
        b_score = _pooled(
            b_q, k_ptr + (i_head // G) * k_head, masked_ptr, o_key, start, end, k_row, scale, D, BLOCK_D, WIDEN
        )
        b_new = tl.maximum(b_max, tl.max(b_score, 1))
        b_sum = b_sum * tl.exp2(b_max - b_new) + tl.sum(tl.exp2(b_score - b_new[:, None]), 1)
        b_max = b_new
    tl.store(lse_ptr + i_head.to(tl.int64) * num_masked + o_query, b_max + tl.log2(b_sum), mask=o_query < end)


@triton.jit(do_not_specialize=["num_masked", "num_sequences"])
def _column_sums(
    q_ptr, k_ptr, masked_ptr, start_ptr, lse_ptr, columns_ptr, scale, num_masked, num_sequences,
    q_row, q_head, k_row, k_head,
    G: constexpr, D: constexpr, BLOCK_D: constexpr, BLOCK: constexpr,
    WIDEN: constexpr,
):  # fmt: skip
    """The attention that a tile of keys gets from all queries of its sequence, for one head."""
    i_head = tl.program_id(1)
    _, start, first, end = tile_of(start_ptr, num_sequences, tl.program_id(0), BLOCK)
    if first >= end:
        return
    o_key = first + tl.arange(0, BLOCK)
    o_head = i_head.to(tl.int64) * num_masked
    b_drawn = tl.zeros([BLOCK], tl.float32)
    for i_query in range(start, end, BLOCK):
        o_query = i_query + tl.arange(0, BLOCK)
        b_q = _rows(q_ptr + i_head * q_head, masked_ptr, o_query, start, end, q_row, D, BLOCK_D, WIDEN)
        b_lse = tl.load(lse_ptr + o_head + o_query, mask=o_query < end, other=float("inf"))
        b_score = _pooled(
            b_q, k_ptr + (i_head // G) * k_head, masked_ptr, o_key, start, end, k_row, scale, D, BLOCK_D, WIDEN
        )
        b_drawn += tl.sum(tl.exp2(b_score - b_lse[:, None]), 0)
    tl.store(columns_ptr + o_head + o_key, b_drawn, mask=o_key < end)


@triton.jit(do_not_specialize=["num_masked"])
def _head_sums(columns_ptr, importance_ptr, num_masked, num_heads, BLOCK: constexpr):
    """Adds heads in order."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_head in range(num_heads):
        b_sum += tl.load(columns_ptr + i_head * num_masked + o, mask=o < num_masked, other=0.0)
    tl.store(importance_ptr + o, b_sum, mask=o < num_masked)
