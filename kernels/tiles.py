"""Shared by kernels: tiles of ragged sequences, found on the device, and attention to a block of keys."""

import triton
import triton.language as tl
from triton.language import constexpr

CHUNK = tl.constexpr(128)  # sequences at a time; fixed, so that batch sizes share a kernel


def num_tiles(num_rows: int, num_sequences: int, block: int) -> int:
    """Tiles for any division of rows among sequences: each sequence but the first may begin within a tile."""
    return max(0, -(-num_rows // block) + num_sequences - 1)


@triton.jit
def tile_of(start_ptr, num_sequences, i_tile, BLOCK: constexpr):
    """A tile's sequence, the starts of sequence and tile, and the sequence's end.

    Sequence s begins at tile start[s] // BLOCK + s, so each may have a part-filled tile. A tile that begins at or after
    its sequence's end is empty.
    """
    before = 0  # summed by chunk: carried as a block it would spoil later layouts
    for i in tl.range(0, num_sequences, CHUNK, num_stages=1):
        o_s = i + tl.arange(0, CHUNK)
        m_s = o_s < num_sequences
        b_first = tl.load(start_ptr + o_s, mask=m_s, other=0) // BLOCK + o_s
        before += tl.sum((m_s & (b_first <= i_tile)).to(tl.int32))
    i_s = before - 1
    start = tl.load(start_ptr + i_s)
    end = tl.load(start_ptr + i_s + 1)
    return i_s, start, start + (i_tile - (start // BLOCK + i_s)) * BLOCK, end


@triton.jit
def matrix_of(x_ptr, o_row, m_row, row, o_column, m_column, WIDEN: constexpr):
    """Rows and columns of a matrix with rows `row` apart; zeros where masked."""
    m = m_row[:, None] & m_column[None, :]
    b = tl.load(x_ptr + o_row.to(tl.int64)[:, None] * row + o_column[None, :], mask=m, other=0.0)
    if WIDEN:
        b = b.to(tl.float32)
    return b


@triton.jit
def rows_of(x_ptr, o_row, m_row, row, D: constexpr, BLOCK_D: constexpr, WIDEN: constexpr):
    """Vectors of one head, [rows, BLOCK_D]; zeros where masked."""
    o_d = tl.arange(0, BLOCK_D)
    return matrix_of(x_ptr, o_row, m_row, row, o_d, o_d < D, WIDEN)


@triton.jit
def scores_of(b_q, p_k, m_k, scale, WIDEN: constexpr):
    """Scores of queries on keys, [queries, keys]; masked keys score 0."""
    b_k = tl.load(p_k, mask=m_k, other=0.0)
    if WIDEN:
        b_k = b_k.to(tl.float32)
    return tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale


@triton.jit
def with_values(b_score, p_v, m_v, b_max, b_sum, b_acc, WIDEN: constexpr):
    """Add a block of keys to a softmax's highest scores, sums and weighted values; scores in base 2."""
    b_new = tl.maximum(b_max, tl.max(b_score, 1))
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_weight = tl.exp2(b_score - b_base[:, None])
    b_decay = tl.exp2(b_max - b_base)
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    if WIDEN:
        b_v = b_v.to(tl.float32)
    b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
    b_acc = tl.dot(b_weight.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="ieee")
    return b_new, b_sum, b_acc
