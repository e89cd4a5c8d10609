"""Tiles of ragged sequences, numbered on the device from where each begins: a launch needs no list of them."""

# ruff: noqa: N803

import triton
import triton.language as tl

CHUNK = tl.constexpr(128)  # sequences looked at together: fixed, so that no batch size is compiled for


def num_tiles(num_rows: int, num_sequences: int, block: int) -> int:
    """Enough for any division of the rows among the sequences."""
    return num_rows // block + num_sequences


@triton.jit
def tile_of(start_ptr, num_sequences, i_tile, BLOCK: tl.constexpr):
    """The sequence that a tile belongs to, where it and the tile begin, and where the sequence ends.

    Sequence s begins at tile start[s] // BLOCK + s, which leaves room for a part-filled tile in each. A tile that
    begins at or after its sequence's end is empty.
    """
    before = 0  # a sum of each chunk: carried as a block it would spoil the layouts of what follows
    for i in tl.range(0, num_sequences, CHUNK, num_stages=1):
        o_s = i + tl.arange(0, CHUNK)
        m_s = o_s < num_sequences
        b_first = tl.load(start_ptr + o_s, mask=m_s, other=0) // BLOCK + o_s
        before += tl.sum((m_s & (b_first <= i_tile)).to(tl.int32))
    i_s = before - 1
    start = tl.load(start_ptr + i_s)
    end = tl.load(start_ptr + i_s + 1)
    return i_s, start, start + (i_tile - (start // BLOCK + i_s)) * BLOCK, end
