"""Ragged paged attention in Triton: flash decoding, split along the keys when queries are few."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..device import interpreted, num_multiprocessors, shared_memory
from ..tiles import matrix_of, num_tiles, scores_of, tile_of, with_values
from . import Sequences

WIDTH = tl.constexpr(64)  # listed positions at a time
SPLITS = tl.constexpr(64)  # at a time, when merged
AHEAD = tl.constexpr(4)  # splits of a round
LEAST_BLOCKS = 4  # blocks of keys in a split: fewer cost more to merge than they save


class Tile(NamedTuple):
    """How a launch is compiled, by rows of queries in a tile; benchmarks/kernels.py --tune times others."""

    keys: int  # at a time; a divisor of the page size needs one page look-up
    num_warps: int
    num_stages: int
    resident: int = 1  # programs on a multiprocessor: keys are split for these (tests/kernels/test_compile.py)


# By rows of queries.
TILES = {16: Tile(64, 4, 3, 2), 32: Tile(32, 4, 5, 2), 64: Tile(32, 4, 4, 2), 128: Tile(64, 8, 3)}
# Without asynchronous products of four warps operands are in registers, and 64 keys do not fit as well.
SMALL_TILES = {32: Tile(64, 4, 3, 2), 64: Tile(32, 8, 3), 128: Tile(32, 8, 3)}


def tile_for(block_m: int, q: Tensor) -> Tile:
    """How a tile of block_m rows is compiled."""
    if q.element_size() > 2:
        return Tile(32, 4, 3)
    small = SMALL_TILES if shared_memory(q.device) < 200 * 1024 else {}  # an A100 has 163 KiB, an H200 227
    return small.get(block_m) or TILES[min(max(block_m, 16), 128)]


def rows_of_a_tile(q: Tensor, num_sequences: int, num_kv_heads: int) -> int:
    """A sequence's mean tokens times the query heads of a KV head, as a power of two."""
    group = q.shape[1] // num_kv_heads
    tokens = -(-q.shape[0] // num_sequences)
    limit = 32 if q.element_size() > 2 else 128
    return max(16, min(int(triton.next_power_of_2(tokens * group)), limit), int(triton.next_power_of_2(group)))


def ragged_paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, sequences: Sequences[Tensor], num_splits: int | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """The launch depends on shapes alone: nothing waits for the device, and graphs can capture it.

    num_splits: the most parts of a sequence's keys; its length on the device decides how many are not empty.
    """
    page_table, query_start, positions, history, listed, block_length, spare = sequences
    num_queries, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k_pages.shape[1], k_pages.shape[2]
    num_sequences, width = listed.shape
    group = num_heads // num_kv_heads
    out = q.new_empty((num_queries, num_heads, head_dim))
    if num_queries == 0:
        return out
    num_read = max(1, num_sequences - spare)
    block_m = rows_of_a_tile(q, num_read, num_kv_heads)
    block_d = max(16, triton.next_power_of_2(head_dim))
    tile = tile or tile_for(block_m, q)
    block_q = block_m // group
    if num_splits is None:
        # Splits that fill the device once if sequences are equal; some launched tiles are empty.
        programs = num_kv_heads * num_read * triton.cdiv(triton.cdiv(num_queries, num_read), block_q)
        num_splits = tile.resident * num_multiprocessors(q.device) // programs
        num_splits = max(1, min(num_splits, page_table.shape[1] * page_size // (LEAST_BLOCKS * tile.keys)))
    if num_splits == 1:
        partial, lse = out, out
    else:
        shape = (num_splits, num_queries, num_heads)
        partial = q.new_empty((*shape, head_dim), dtype=torch.float32)
        lse = q.new_empty(shape, dtype=torch.float32)
    num_stages = tile.num_stages
    while (block_m + 2 * num_stages * tile.keys) * block_d * q.element_size() > shared_memory(q.device) > 0:
        num_stages -= 1
    num = num_tiles(num_queries, num_sequences, block_q)
    _attend[(num * num_kv_heads, num_splits)](
        q, k_pages, v_pages, page_table, query_start, positions, history, listed, partial, lse,
        head_dim**-0.5 * 1.4426950408889634, num_queries, num_sequences, num, width, block_length,
        *q.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3], page_table.stride(0), listed.stride(0),
        H=num_kv_heads, G=group, D=head_dim, PAGE=page_size, SPLIT=num_splits > 1, LEAST=LEAST_BLOCKS * tile.keys,
        BLOCK_M=block_m, BLOCK_N=tile.keys, BLOCK_D=block_d, WIDEN=interpreted(q), num_warps=tile.num_warps,
        num_stages=num_stages,
    )  # fmt: skip
    if num_splits > 1:
        rows = num_queries * num_heads
        block_r = max(1, 2048 // block_d)
        _merge[(triton.cdiv(rows, block_r),)](
            partial, lse, out, rows, num_splits, D=head_dim, BLOCK_R=block_r, BLOCK_D=block_d
        )
    return out


@triton.jit(
    do_not_specialize=[
        "num_queries", "num_sequences", "num_tiles", "width", "block_length", "table_row", "listed_row",
    ]
)  # fmt: skip
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, start_ptr, positions_ptr, history_ptr, listed_ptr, out_ptr, lse_ptr,
    scale, num_queries, num_sequences, num_tiles, width, block_length,
    q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, table_row, listed_row,
    H: constexpr, G: constexpr, D: constexpr, PAGE: constexpr, SPLIT: constexpr, LEAST: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_D: constexpr, WIDEN: constexpr,
):  # fmt: skip
    """One tile of one sequence's queries, for the heads of one KV head, over one split of its keys; scale in base 2.

    The last tile goes first: callers put sequences with many keys last, and a long one should not begin late.
    """
    BLOCK_Q: constexpr = BLOCK_M // G
    i_head, i_split = tl.program_id(0) % H, tl.program_id(1)
    i_s, _, first, end = tile_of(start_ptr, num_sequences, num_tiles - 1 - tl.program_id(0) // H, BLOCK_Q)
    if first >= end:
        return

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_row = first + o_m // G
    m_row = (o_m // G < BLOCK_Q) & (o_row < end)
    o_row = o_row.to(tl.int64)
    o_head = i_head * G + o_m % G
    if SPLIT:
        # Most splits of a wide page table end here: a split has at least LEAST keys.
        most_keys = tl.load(history_ptr + i_s) + width
        if i_split * LEAST >= most_keys:
            o_out = (i_split.to(tl.int64) * num_queries + o_row) * (H * G) + o_head
            tl.store(lse_ptr + o_out, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=m_row)
            return
    b_q = matrix_of(q_ptr + o_head[:, None] * q_head, o_row, m_row, q_row, o_d, m_d, WIDEN)
    # Keys before the limit are in the query's own block or an earlier one.
    b_limit = (tl.load(positions_ptr + o_row, mask=m_row, other=-1) // block_length + 1) * block_length
    shortest = tl.min(tl.where(m_row, b_limit, 2147483647))
    b_limit = tl.where(m_row, b_limit, 0)

    history = tl.load(history_ptr + i_s)
    listed_ptr += i_s.to(tl.int64) * listed_row
    last = 0
    for i_w in tl.range(0, width, WIDTH, num_stages=1):
        o_w = i_w + tl.arange(0, WIDTH)
        b_listed = tl.load(listed_ptr + o_w, mask=o_w < width, other=0)
        last = tl.maximum(last, tl.max(tl.where(b_listed != 0, o_w + 1, 0)))
    num_keys = tl.minimum(history + last, tl.max(b_limit))
    low = 0
    high = num_keys
    if SPLIT:
        # Blocks of keys begin at multiples of BLOCK_N. Short sequences leave the last splits empty.
        share = tl.cdiv(tl.maximum(tl.cdiv(num_keys, tl.num_programs(1)), LEAST), BLOCK_N) * BLOCK_N
        low = i_split * share
        high = tl.minimum(low + share, num_keys)
        if low >= high:
            o_out = (i_split.to(tl.int64) * num_queries + o_row) * (H * G) + o_head
            tl.store(lse_ptr + o_out, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=m_row)
            return
    full_end = tl.minimum(tl.minimum(history, shortest), high) // BLOCK_N * BLOCK_N

    table_ptr += i_s.to(tl.int64) * table_row
    k_ptr += i_head.to(tl.int64) * k_head
    v_ptr += i_head.to(tl.int64) * v_head
    o_n = tl.arange(0, BLOCK_N)
    o_k = o_n[:, None] * k_slot + o_d[None, :]
    o_v = o_n[:, None] * v_slot + o_d[None, :]
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # First the blocks that all queries see in full, then the others, key by key.
    for MASKED in tl.static_range(2):
        if MASKED:
            i_first = tl.maximum(low, full_end)
            i_last = high
        else:
            i_first = low
            i_last = full_end
        # Look up the page a block ahead: loads of K and V then wait for no other load.
        next_page = tl.load(table_ptr + i_first // PAGE, mask=i_first < i_last, other=0).to(tl.int64)
        # Masked blocks are few: unrolling would only take registers.
        for i_key in tl.range(i_first, i_last, BLOCK_N, num_stages=2 if MASKED else None):
            o_key = i_key + o_n
            m_kv = m_d[None, :]
            m_offered = o_key < high
            if MASKED:
                o_listed = o_key - history
                m_listed = m_offered & (o_listed >= 0)
                m_offered = m_offered & (tl.load(listed_ptr + o_listed, mask=m_listed, other=1) != 0)
                m_kv = m_offered[:, None] & m_d[None, :]
            if PAGE % BLOCK_N == 0:
                page = next_page
                i_next = i_key + BLOCK_N
                next_page = tl.load(table_ptr + i_next // PAGE, mask=i_next < i_last, other=0).to(tl.int64)
                p_k = k_ptr + page * k_page + i_key % PAGE * k_slot + o_k
                p_v = v_ptr + page * v_page + i_key % PAGE * v_slot + o_v
            else:
                b_page = tl.load(table_ptr + o_key // PAGE, mask=m_offered, other=0).to(tl.int64)
                p_k = k_ptr + (b_page * k_page + o_key % PAGE * k_slot)[:, None] + o_d[None, :]
                p_v = v_ptr + (b_page * v_page + o_key % PAGE * v_slot)[:, None] + o_d[None, :]
            b_score = scores_of(b_q, p_k, m_kv, scale, WIDEN)
            if MASKED:
                m_seen = m_offered[None, :] & (o_key[None, :] < b_limit[:, None])
                b_score = tl.where(m_seen, b_score, float("-inf"))
            b_max, b_sum, b_acc = with_values(b_score, p_v, m_kv, b_max, b_sum, b_acc, WIDEN)

    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)  # a query that sees no key
    b_out = b_acc / b_sum[:, None]
    o_out = (i_split.to(tl.int64) * num_queries + o_row) * (H * G) + o_head
    m_out = m_row[:, None] & m_d[None, :]
    tl.store(out_ptr + o_out[:, None] * D + o_d[None, :], b_out.to(out_ptr.dtype.element_ty), mask=m_out)
    if SPLIT:
        tl.store(lse_ptr + o_out, b_max + tl.log2(b_sum), mask=m_row)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge(
    partial_ptr, lse_ptr, out_ptr, num_rows, num_splits,
    D: constexpr, BLOCK_R: constexpr, BLOCK_D: constexpr,
):  # fmt: skip
    """Merge the splits of some rows (each a head of a query), always in the same order."""
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    m_r = o_r < num_rows
    m_out = m_r[:, None] & (o_d < D)[None, :]
    # Most splits of a wide page table are empty: stop after the last that is not.
    o_s = tl.arange(0, SPLITS)
    last = 0
    for i in tl.range(0, num_splits, SPLITS, num_stages=1):
        o_lse = (i + o_s).to(tl.int64)[:, None] * num_rows + o_r[None, :]
        m_s = (i + o_s < num_splits)[:, None] & m_r[None, :]
        b_lse = tl.load(lse_ptr + o_lse, mask=m_s, other=float("-inf"))
        last = tl.maximum(last, tl.max(tl.where(b_lse > float("-inf"), (i + o_s + 1)[:, None], 0)))
    b_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_R], tl.float32)
    b_acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for i in tl.range(0, last, AHEAD, num_stages=1):
        # Unrolled: no load waits for another.
        for j in tl.static_range(AHEAD):
            o_row = o_r + (i + j) * num_rows.to(tl.int64)
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
