"""Window attention in Triton: heads of 256 and 512 fit a multiprocessor without a spill."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..device import interpreted, shared_memory
from ..tiles import matrix_of, num_tiles, scores_of, tile_of, with_values
from . import Spans


class Tile(NamedTuple):
    """How a launch is compiled; benchmarks/kernels.py --tune times others."""

    rows: int  # of queries, with all query heads of a KV head
    keys: int  # at a time; a divisor of the page size needs one page look-up
    num_warps: int
    num_stages: int
    parts: int = 1  # programs that share a head's columns of values; each scores all keys


# By head width: fp32 sums of rows x width take half of the registers; two stages of keys and values take the shared
# memory that queries leave. Heads of 512 are summed in two programs: one has registers for 64 rows only, which Triton
# scores twice, once in each half of the warps, by wgmma of 16 keys.
TILES = {128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 3), 512: Tile(128, 32, 8, 2, 2)}
SMALL_TILES = {128: Tile(64, 32, 4, 2), 256: Tile(64, 32, 8, 1), 512: Tile(32, 16, 8, 1)}  # of 99 KiB


def tile_for(q: Tensor) -> Tile:
    """How attention of q's heads is compiled."""
    if q.element_size() > 2:
        return Tile(16, 32, 4, 1)
    small = 0 < shared_memory(q.device) < 200 * 1024  # an A100 has 163 KiB, an H200 227
    return (SMALL_TILES if small else TILES)[min(512, max(128, triton.next_power_of_2(q.shape[2])))]


def window_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, spans: Spans, window: int, causal: bool, scale: float,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """The launch depends on shapes alone: nothing waits for the device, and graphs can capture it."""
    num_queries, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k_pages.shape[1], k_pages.shape[2]
    num_sequences = len(spans.lengths)
    group = num_heads // num_kv_heads
    out = q.new_empty((num_queries, num_heads, head_dim))
    if num_queries == 0:
        return out
    tile = tile or tile_for(q)
    block_m = max(tile.rows, int(triton.next_power_of_2(group)))
    num = num_tiles(num_queries, num_sequences, block_m // group)
    block_d = max(16, triton.next_power_of_2(head_dim))
    _attend[(num * num_kv_heads * tile.parts,)](
        q, k_pages, v_pages, spans.page_table, spans.query_start, spans.lengths, out,
        scale * 1.4426950408889634, num_sequences, num,
        *q.stride()[:2], k_pages.stride(0), k_pages.stride(2), v_pages.stride(0), v_pages.stride(2),
        spans.page_table.stride(0), K_SLOT=k_pages.stride(1), V_SLOT=v_pages.stride(1),
        H=num_kv_heads, G=group, D=head_dim, PAGE=page_size, WINDOW=window, CAUSAL=causal, BLOCK_M=block_m,
        BLOCK_N=tile.keys, BLOCK_D=block_d, BLOCK_V=block_d // tile.parts, WIDEN=interpreted(q),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_sequences", "num_tiles", "table_row"])
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, start_ptr, lengths_ptr, out_ptr, scale, num_sequences, num_tiles,
    q_row, q_head, k_page, k_head, v_page, v_head, table_row, K_SLOT: constexpr, V_SLOT: constexpr,
    H: constexpr, G: constexpr, D: constexpr, PAGE: constexpr, WINDOW: constexpr, CAUSAL: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_D: constexpr, BLOCK_V: constexpr, WIDEN: constexpr,
):  # fmt: skip
    """One tile of one sequence's queries, for the heads of one KV head, the last tile first; scale in base 2."""
    BLOCK_Q: constexpr = BLOCK_M // G
    PARTS: constexpr = BLOCK_D // BLOCK_V
    i_head = tl.program_id(0) // PARTS % H
    i_tile = num_tiles - 1 - tl.program_id(0) // (PARTS * H)
    i_s, start, first, end = tile_of(start_ptr, num_sequences, i_tile, BLOCK_Q)
    if first >= end:
        return

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_c = tl.program_id(0) % PARTS * BLOCK_V + tl.arange(0, BLOCK_V)
    m_c = o_c < D
    o_row = first + o_m // G
    m_row = (o_m // G < BLOCK_Q) & (o_row < end)
    o_head = i_head * G + o_m % G
    b_q = matrix_of(q_ptr + o_head[:, None] * q_head, o_row, m_row, q_row, o_d, m_d, WIDEN)
    length = tl.load(lengths_ptr + i_s)
    begin = length - (end - start)  # position of the sequence's first row
    b_position = begin + o_row - start
    low = 0
    high = length
    if CAUSAL:
        high = tl.minimum(length, begin + first + BLOCK_Q - start)
        if WINDOW:
            low = tl.maximum(0, begin + first - start - WINDOW + 1)
    elif WINDOW:
        low = tl.maximum(0, begin - WINDOW + 1)

    table_ptr += i_s.to(tl.int64) * table_row
    k_ptr += i_head.to(tl.int64) * k_head
    v_ptr += i_head.to(tl.int64) * v_head
    o_n = tl.arange(0, BLOCK_N)
    o_k = o_n[:, None] * K_SLOT + o_d[None, :]
    o_v = o_n[:, None] * V_SLOT + o_c[None, :]
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # Blocks begin at multiples of their length: each is in one page, looked up a block ahead.
    i_first = low // BLOCK_N * BLOCK_N
    next_page = tl.load(table_ptr + i_first // PAGE, mask=i_first < high, other=0).to(tl.int64)
    for i_key in tl.range(i_first, high, BLOCK_N):
        o_key = i_key + o_n
        m_key = (o_key >= low) & (o_key < high)
        m_k = m_key[:, None] if D == BLOCK_D else m_key[:, None] & m_d[None, :]
        m_v = m_key[:, None] if D == BLOCK_D else m_key[:, None] & m_c[None, :]
        if PAGE % BLOCK_N == 0:
            page = next_page
            i_next = i_key + BLOCK_N
            next_page = tl.load(table_ptr + i_next // PAGE, mask=i_next < high, other=0).to(tl.int64)
            p_k = k_ptr + page * k_page + i_key % PAGE * K_SLOT + o_k
            p_v = v_ptr + page * v_page + i_key % PAGE * V_SLOT + o_v
        else:
            b_page = tl.load(table_ptr + o_key // PAGE, mask=m_key, other=0).to(tl.int64)
            p_k = k_ptr + (b_page * k_page + o_key % PAGE * K_SLOT)[:, None] + o_d[None, :]
            p_v = v_ptr + (b_page * v_page + o_key % PAGE * V_SLOT)[:, None] + o_c[None, :]
        b_score = scores_of(b_q, p_k, m_k, scale, WIDEN)
        m_seen = m_key[None, :]
        if CAUSAL:
            m_seen &= o_key[None, :] <= b_position[:, None]
            if WINDOW:
                m_seen &= o_key[None, :] > b_position[:, None] - WINDOW
        b_score = tl.where(m_seen, b_score, float("-inf"))
        b_max, b_sum, b_acc = with_values(b_score, p_v, m_v, b_max, b_sum, b_acc, WIDEN)

    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]  # 0: a query that sees no key
    o_out = (o_row.to(tl.int64) * (H * G) + o_head)[:, None] * D + o_c[None, :]
    tl.store(out_ptr + o_out, b_out.to(out_ptr.dtype.element_ty), mask=m_row[:, None] & m_c[None, :])
