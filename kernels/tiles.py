"""Tiles of ragged sequences, numbered on the device from where each begins: a launch needs no list of them."""

# ruff: noqa: N803

import triton
import triton.language as tl


def num_tiles(num_rows: int, num_sequences: int, block: int) -> int:
    """Enough for any division of the rows among the sequences."""
    return num_rows // block + num_sequences


@triton.jit
def tile_of(start_ptr, num_sequences, i_tile, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr):
    """The sequence that a tile belongs to, where it and the tile begin, and where the sequence ends.

    Sequence s begins at tile start[s] // BLOCK + s, which leaves room for a part-filled tile in each. A tile that
    begins at or after its sequence's end is empty.
    """
    o_s = tl.arange(0, BLOCK_S)
    b_first = tl.load(start_ptr + o_s, mask=o_s < num_sequences, other=0) // BLOCK + o_s
    i_s = tl.sum(((o_s < num_sequences) & (b_first <= i_tile)).to(tl.int32)) - 1
    start = tl.load(start_ptr + i_s)
    end = tl.load(start_ptr + i_s + 1)
    return i_s, start, start + (i_tile - (start // BLOCK + i_s)) * BLOCK, end
