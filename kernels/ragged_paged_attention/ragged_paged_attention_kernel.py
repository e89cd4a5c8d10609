"""Ragged paged attention in Triton: flash decoding, split along the keys when queries are few."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..device import interpreted, num_multiprocessors, shared_memory
from ..tiles import matrix_of, num_tiles, strided, tile_of
from . import Sequences

WIDTH = tl.constexpr(64)  # listed positions at a time
SPLITS = tl.constexpr(64)  # at a time, when merged
AHEAD = tl.constexpr(4)  # splits of a round
LEAST_BLOCKS = tl.constexpr(4)  # blocks of keys in a split: fewer cost more to merge than they save


class Tile(NamedTuple):
    """How a launch is compiled, by rows of queries in a tile; benchmarks/kernel_ceilings.py --tune times others."""

    keys: int  # at a time; a divisor of the page size needs one page look-up
    num_warps: int
    num_stages: int
    resident: int = 1  # programs on a multiprocessor: keys are split for these (tests/kernels/test_compile.py)


# By rows of queries.
TILES = {16: Tile(64, 4, 3, 2), 32: Tile(32, 4, 5, 2), 64: Tile(32, 4, 4, 2), 128: Tile(64, 8, 3)}
# Without asynchronous products of four warps operands are in registers, and 64 keys do not fit as well.
SMALL_TILES = {32: Tile(64, 4, 3, 2), 64: Tile(32, 8, 3), 128: Tile(32, 8, 3)}
WIDE_TILE = Tile(32, 8, 3)  # of heads above 128
WIDE_NUMBERS = 1 << 14  # of its fp32 sums, which take half of the registers


class Sizes(NamedTuple):
    """What a launch of `_attend` is compiled for."""

    heads: int  # of keys
    group: int  # heads of queries for one of keys
    head_dim: int
    page: int
    slot: int  # numbers from one key to the next
    window: int
    scale: float  # in base 2
    split: bool
    rows: int  # of a tile: queries times `group`
    keys: int  # at a time
    width: int  # of a head, padded
    widen: bool


def tile_for(block_m: int, q: Tensor) -> Tile:
    """How a tile of block_m rows is compiled."""
    if q.element_size() > 2:
        return Tile(32, 4, 3)
    if q.shape[2] > 128:
        return WIDE_TILE
    tiles = TILES
    if shared_memory(q.device) < 200 * 1024:  # an A100 has 163 KiB, an H200 227
        tiles = TILES | SMALL_TILES
    return tiles[min(max(block_m, 16), 128)]


def rows_of_a_tile(q: Tensor, num_sequences: int, num_kv_heads: int) -> int:
    """A sequence's mean tokens times the query heads of a KV head, as a power of two."""
    group = q.shape[1] // num_kv_heads
    tokens = -(-q.shape[0] // num_sequences)
    limit = 128
    if q.element_size() > 2:
        limit = 32
    elif q.shape[2] > 128:
        limit = WIDE_NUMBERS // int(triton.next_power_of_2(q.shape[2]))
    return max(16, min(int(triton.next_power_of_2(tokens * group)), limit), int(triton.next_power_of_2(group)))


def ragged_paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    sequences: Sequences[Tensor],
    window: int = 0,
    scale: float | None = None,
    *,
    num_splits: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The launch depends on shapes alone: nothing waits for the device, and graphs can capture it.

    num_splits: the most parts of a sequence's keys; its length on the device decides how many are not empty.
    """
    num_queries, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k_pages.shape[1], k_pages.shape[2]
    num_sequences, width = sequences.listed.shape
    group = num_heads // num_kv_heads
    out = q.new_empty((num_queries, num_heads, head_dim))
    if num_queries == 0:
        return out
    num_read = max(1, num_sequences - sequences.spare)
    block_m = rows_of_a_tile(q, num_read, num_kv_heads)
    block_d = max(16, triton.next_power_of_2(head_dim))
    tile = tile or tile_for(block_m, q)
    block_q = block_m // group
    if num_splits is None:
        # Splits that fill the device once if sequences are equal; some launched tiles are empty.
        programs = num_kv_heads * num_read * triton.cdiv(triton.cdiv(num_queries, num_read), block_q)
        num_splits = tile.resident * num_multiprocessors(q.device) // programs
        num_splits = max(
            1, min(num_splits, sequences.page_table.shape[1] * page_size // (LEAST_BLOCKS.value * tile.keys))
        )
    partial = lse = out
    if num_splits > 1:
        shape = (num_queries, num_heads, num_splits)
        partial = q.new_empty((*shape, head_dim), dtype=torch.float32)
        lse = q.new_empty(shape, dtype=torch.float32)
    num_stages = tile.num_stages
    while (block_m + 2 * num_stages * tile.keys) * block_d * q.element_size() > shared_memory(q.device) > 0:
        num_stages -= 1
    num = num_tiles(num_queries, num_sequences, block_q)
    sizes = Sizes(
        heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        page=page_size,
        slot=k_pages.stride(1),
        window=window,
        scale=(scale or head_dim**-0.5) * 1.4426950408889634,
        split=num_splits > 1,
        rows=block_m,
        keys=tile.keys,
        width=block_d,
        widen=interpreted(q),
    )
    arrays = tuple(x.contiguous() for x in sequences[:5])
    _attend[(num * num_kv_heads, num_splits)](
        (strided(q), strided(k_pages), v_pages, partial, lse),
        arrays,
        num_sequences,
        sequences.page_table.shape[1],
        width,
        sequences.block_length,
        sizes,
        num_warps=tile.num_warps,
        num_stages=num_stages,
    )
    if num_splits > 1:
        rows = num_queries * num_heads
        block_r = max(1, 2048 // block_d)
        _merge[(triton.cdiv(rows, block_r),)](partial, lse, out, rows, num_splits, sizes, BLOCK_R=block_r, num_warps=4)
    return out


@triton.jit
def _store_empty(lse_ptr, o_out, m_row):
    tl.store(lse_ptr + o_out, tl.full(o_out.shape, float("-inf"), tl.float32), mask=m_row)


@triton.jit(do_not_specialize=["num_sequences", "num_pages", "num_listed", "block_length"])
def _attend(tensors, arrays, num_sequences, num_pages, num_listed, block_length, sizes: constexpr):
    """One tile of one sequence's queries, for the heads of one KV head, over one split of its keys."""
    H: constexpr = sizes.heads
    G: constexpr = sizes.group
    BLOCK_N: constexpr = sizes.keys
    BLOCK_Q: constexpr = sizes.rows // G
    q, k, v_ptr, out_ptr, lse_ptr = tensors
    table_ptr, start_ptr, positions_ptr, history_ptr, listed_ptr = arrays
    i_head, i_split = tl.program_id(0) % H, tl.program_id(1)
    i_s, _, first, end = tile_of(start_ptr, num_sequences, tl.program_id(0) // H, BLOCK_Q)
    if first >= end:
        return

    o_m = tl.arange(0, sizes.rows)
    o_d = tl.arange(0, sizes.width)
    m_d = o_d < sizes.head_dim
    o_row = first + o_m // G
    m_row = (o_m // G < BLOCK_Q) & (o_row < end)
    o_row = o_row.to(tl.int64)
    o_head = i_head * G + o_m % G
    history = tl.load(history_ptr + i_s)
    if sizes.split:
        # Most splits of a wide page table end here: a split has at least LEAST_BLOCKS of them.
        most_keys = history + num_listed
        if i_split * LEAST_BLOCKS * BLOCK_N >= most_keys:
            _store_empty(lse_ptr, (o_row * (H * G) + o_head) * tl.num_programs(1) + i_split, m_row)
            return
    q_ptr = q.ptr + o_head[:, None] * q.strides[1]
    b_q = matrix_of(q_ptr, o_row, m_row, q.strides[0], sizes.head_dim, sizes.width, sizes.widen)
    # Keys before the limit are in the query's own block or an earlier one.
    b_position = tl.load(positions_ptr + o_row, mask=m_row, other=-1)
    b_limit = (b_position // block_length + 1) * block_length
    shortest = tl.min(tl.where(m_row, b_limit, 2147483647))
    b_limit = tl.where(m_row, b_limit, 0)
    b_begin = tl.minimum(b_position, history) - sizes.window + 1
    begin = 0  # the first key that any query sees
    if sizes.window:
        begin = tl.maximum(tl.min(tl.where(m_row, b_begin, 2147483647)), 0)

    listed_ptr += i_s.to(tl.int64) * num_listed
    last = 0
    for i_w in tl.range(0, num_listed, WIDTH, num_stages=1):
        o_w = i_w + tl.arange(0, WIDTH)
        b_listed = tl.load(listed_ptr + o_w, mask=o_w < num_listed, other=0)
        last = tl.maximum(last, tl.max(tl.where(b_listed != 0, o_w + 1, 0)))
    high = tl.minimum(history + last, tl.max(b_limit))
    low = begin // BLOCK_N * BLOCK_N  # blocks of keys begin at multiples of their length
    if sizes.split:
        # Short sequences leave the last splits empty.
        share = tl.maximum(tl.cdiv(high - low, tl.num_programs(1)), LEAST_BLOCKS * BLOCK_N)
        low += i_split * tl.cdiv(share, BLOCK_N) * BLOCK_N
        high = tl.minimum(low + tl.cdiv(share, BLOCK_N) * BLOCK_N, high)
        if low >= high:
            _store_empty(lse_ptr, (o_row * (H * G) + o_head) * tl.num_programs(1) + i_split, m_row)
            return
    # A window is short: all of its blocks are masked.
    full_end = low
    if not sizes.window:
        full_end = tl.minimum(tl.minimum(history, shortest), high) // BLOCK_N * BLOCK_N

    table_ptr += i_s.to(tl.int64) * num_pages
    k_ptr = k.ptr + i_head.to(tl.int64) * k.strides[2]
    v_ptr += i_head.to(tl.int64) * k.strides[2]
    o_n = tl.arange(0, BLOCK_N)
    o_block = o_n[:, None] * sizes.slot + o_d[None, :]
    b_max = tl.full([sizes.rows], float("-inf"), tl.float32)
    b_sum = tl.zeros([sizes.rows], tl.float32)
    b_acc = tl.zeros([sizes.rows, sizes.width], tl.float32)
    # First the blocks that all queries see in full, then the others, key by key.
    for MASKED in tl.static_range(2):
        i_first = low
        i_last = full_end
        if MASKED:
            i_first = tl.maximum(low, full_end)
            i_last = high
        # Look up the page a block ahead: loads of K and V then wait for no other load.
        next_page = tl.load(table_ptr + i_first // sizes.page, mask=i_first < i_last, other=0).to(tl.int64)
        # Masked blocks are few: unrolling would only take registers.
        for i_key in tl.range(i_first, i_last, BLOCK_N, num_stages=2 if MASKED else None):
            o_key = i_key + o_n
            m_kv = m_d[None, :]
            m_offered = o_key < high
            if MASKED:
                o_listed = o_key - history
                m_listed = m_offered & (o_listed >= 0)
                m_offered = m_offered & (tl.load(listed_ptr + o_listed, mask=m_listed, other=1) != 0)
                if sizes.window:
                    m_offered = m_offered & (o_key >= begin)
                m_kv = m_offered[:, None]
                if sizes.head_dim < sizes.width:
                    m_kv = m_kv & m_d[None, :]
            if sizes.page % BLOCK_N == 0:
                page = next_page
                i_next = i_key + BLOCK_N
                next_page = tl.load(table_ptr + i_next // sizes.page, mask=i_next < i_last, other=0).to(tl.int64)
                o_kv = page * k.strides[0] + i_key % sizes.page * sizes.slot + o_block
            else:
                b_page = tl.load(table_ptr + o_key // sizes.page, mask=m_offered, other=0).to(tl.int64)
                o_kv = (b_page * k.strides[0] + o_key % sizes.page * sizes.slot)[:, None] + o_d[None, :]
            b_k = tl.load(k_ptr + o_kv, mask=m_kv, other=0.0)
            if sizes.widen:
                b_k = b_k.to(tl.float32)
            b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * sizes.scale
            if MASKED:
                m_seen = m_offered[None, :] & (o_key[None, :] < b_limit[:, None])
                if sizes.window:
                    m_seen = m_seen & (o_key[None, :] >= b_begin[:, None])
                b_score = tl.where(m_seen, b_score, float("-inf"))
            # A softmax in base 2: highest scores, sums and weighted values.
            b_new = tl.maximum(b_max, tl.max(b_score, 1))
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_weight = tl.exp2(b_score - b_base[:, None])
            b_decay = tl.exp2(b_max - b_base)
            b_v = tl.load(v_ptr + o_kv, mask=m_kv, other=0.0)
            if sizes.widen:
                b_v = b_v.to(tl.float32)
            b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
            b_acc = tl.dot(b_weight.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="ieee")
            b_max = b_new

    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)  # a query that sees no key
    o_out = (o_row * (H * G) + o_head) * tl.num_programs(1) + i_split
    m_out = m_row[:, None] & m_d[None, :]
    o_out_d = o_out[:, None] * sizes.head_dim + o_d[None, :]
    tl.store(out_ptr + o_out_d, (b_acc / b_sum[:, None]).to(out_ptr.dtype.element_ty), mask=m_out)
    if sizes.split:
        tl.store(lse_ptr + o_out, b_max + tl.log2(b_sum), mask=m_row)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge(partial_ptr, lse_ptr, out_ptr, num_rows, num_splits, sizes: constexpr, BLOCK_R: constexpr):
    """Merge the splits of some rows (each a head of a query), always in the same order."""
    D: constexpr = sizes.head_dim
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, sizes.width)
    m_r = o_r < num_rows
    m_out = m_r[:, None] & (o_d < D)[None, :]
    # Most splits of a wide page table are empty: stop after the last that is not.
    o_s = tl.arange(0, SPLITS)
    last = 0
    for i in tl.range(0, num_splits, SPLITS, num_stages=1):
        o_lse = (i + o_s)[:, None] + o_r[None, :] * num_splits
        m_s = (i + o_s < num_splits)[:, None] & m_r[None, :]
        b_lse = tl.load(lse_ptr + o_lse, mask=m_s, other=float("-inf"))
        last = tl.maximum(last, tl.max(tl.where(b_lse > float("-inf"), (i + o_s + 1)[:, None], 0)))
    b_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_R], tl.float32)
    b_acc = tl.zeros([BLOCK_R, sizes.width], tl.float32)
    for i in tl.range(0, last, AHEAD, num_stages=1):
        # Unrolled: no load waits for another.
        for j in tl.static_range(AHEAD):
            o_row = o_r * num_splits + i + j
            m_j = i + j + o_r * 0 < last
            b_lse = tl.load(lse_ptr + o_row, mask=m_r & m_j, other=float("-inf"))
            b_part = tl.load(partial_ptr + o_row[:, None] * D + o_d[None, :], mask=m_out & m_j[:, None], other=0.0)
            # An empty split wrote only its lse.
            b_part = tl.where((b_lse > float("-inf"))[:, None], b_part, 0.0)
            b_new = tl.maximum(b_max, b_lse)
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_weight = tl.exp2(b_lse - b_base)
            b_decay = tl.exp2(b_max - b_base)
            b_sum = b_sum * b_decay + b_weight
            b_acc = b_acc * b_decay[:, None] + b_weight[:, None] * b_part
            b_max = b_new
    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    tl.store(out_ptr + o_r[:, None] * D + o_d[None, :], b_out.to(out_ptr.dtype.element_ty), mask=m_out)
