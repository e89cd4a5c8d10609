"""Shared by kernels: tensors with their strides, tiles of ragged sequences, and attention to a block of keys."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

CHUNK = tl.constexpr(128)  # sequences at a time; fixed, so that batch sizes share a kernel


class Strided(NamedTuple):
    """A tensor as a kernel takes it.

    Triton 3.6 refuses keyword-only parameters, so kernels take records. It compiles for each number of a record that
    is 1 or a multiple of 16: numbers that vary from step to step are parameters, in `do_not_specialize`.
    """

    ptr: Any
    strides: Any  # of all dimensions but the last, whose stride is 1


def strided(x: Tensor) -> Strided:
    return Strided(x, x.stride()[:-1])


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
def matrix_of(x_ptr, o_row, m_row, row, D: constexpr, BLOCK_D: constexpr, WIDEN: constexpr):
    """Rows of D numbers, `row` apart, [rows, BLOCK_D]; zeros where masked."""
    o_d = tl.arange(0, BLOCK_D)
    m = m_row[:, None] & (o_d < D)[None, :]
    b = tl.load(x_ptr + o_row.to(tl.int64)[:, None] * row + o_d[None, :], mask=m, other=0.0)
    return b.to(tl.float32) if WIDEN else b
