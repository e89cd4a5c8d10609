"""Tiles of ragged sequences, found on the device from each sequence's start: a launch needs no list of them."""

import triton
import triton.language as tl

CHUNK = tl.constexpr(128)  # sequences looked at together: fixed, so that no batch size is compiled for


def num_tiles(num_rows: int, num_sequences: int, block: int) -> int:
    """Tiles for any division of the rows among the sequences: each but the first may begin within a tile."""
    return max(0, -(-num_rows // block) + num_sequences - 1)


@triton.jit
def tile_of(start_ptr, num_sequences, i_tile, BLOCK: tl.constexpr):
    """A tile's sequence, the starts of the sequence and of the tile, and the sequence's end.

    Sequence s begins at tile start[s] // BLOCK + s: each may have a part-filled tile. A tile that begins at or after
    its sequence's end is empty.
    """
    before = 0  # summed for each chunk: carried as a block it would spoil later layouts
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
def matrix_of(x_ptr, o_row, m_row, row, o_column, m_column, WIDEN: tl.constexpr):
    """Rows and columns of a matrix whose rows are `row` apart, zeros where masked."""
    m = m_row[:, None] & m_column[None, :]
    b = tl.load(x_ptr + o_row.to(tl.int64)[:, None] * row + o_column[None, :], mask=m, other=0.0)
    if WIDEN:
        b = b.to(tl.float32)
    return b


@triton.jit
def rows_of(x_ptr, o_row, m_row, row, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr):
    """Vectors of one head, [rows, BLOCK_D], zeros where masked."""
    o_d = tl.arange(0, BLOCK_D)
    return matrix_of(x_ptr, o_row, m_row, row, o_d, o_d < D, WIDEN)
