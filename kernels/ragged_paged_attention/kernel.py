"""Attention of ragged queries over paged keys in Triton: flash decoding, split along the keys when queries are few."""

# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl

from ..device import interpreted, num_multiprocessors, shared_memory
from ..tiles import num_tiles, tile_of

# Programs that a multiprocessor should have to choose from before the keys are no longer split further. Not measured.
PROGRAMS_PER_MULTIPROCESSOR = 4
MAX_SPLITS = 32


def ragged_paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    listed: torch.Tensor,
    block_length: int,
    scale: float,
    num_splits: int | None = None,
) -> torch.Tensor:
    """See the launcher. Its shape alone decides the launch, so nothing waits for the device and graphs can hold it."""
    num_queries, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k_pages.shape[1], k_pages.shape[2]
    num_sequences, width = listed.shape
    group = num_heads // num_kv_heads
    out = torch.empty((num_queries, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_queries == 0:
        return out
    # A tile holds the query heads of one KV head for as many tokens as a sequence has on average.
    wide = q.element_size() > 2
    tokens = -(-num_queries // num_sequences)
    block_m = max(16, min(triton.next_power_of_2(tokens * group), 32 if wide else 128), triton.next_power_of_2(group))
    block_n = 32 if wide else 64
    block_d = max(16, triton.next_power_of_2(head_dim))
    tiles = num_tiles(num_queries, num_sequences, block_m // group)
    if num_splits is None:
        enough = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(q.device)
        useful = page_table.shape[1] * page_size // (4 * block_n)
        num_splits = max(1, min(enough // (tiles * num_kv_heads), useful, MAX_SPLITS))
        num_splits = 1 << (num_splits.bit_length() - 1)  # few variants to compile
    if num_splits == 1:
        partial, lse = out, out
    else:
        shape = (num_splits, num_queries, num_heads)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    tile = (block_m + 2 * block_n) * block_d * q.element_size()
    _attend[(tiles, num_kv_heads, num_splits)](
        q, k_pages, v_pages, page_table, query_start, positions, history, listed, partial, lse,
        scale * 1.4426950408889634, num_queries, num_sequences, width, block_length,
        q.stride(0), q.stride(1), k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        v_pages.stride(0), v_pages.stride(1), v_pages.stride(2), page_table.stride(0), listed.stride(0),
        G=group, D=head_dim, PAGE=page_size, NUM_SPLITS=num_splits,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        BLOCK_S=triton.next_power_of_2(num_sequences + 1), BLOCK_W=triton.next_power_of_2(max(width, 1)),
        WIDEN=interpreted(q), num_warps=8 if block_m > 64 else 4,
        num_stages=3 if 3 * tile <= shared_memory(q.device) else 2,
    )  # fmt: skip
    if num_splits > 1:
        rows = num_queries * num_heads
        block_r = max(1, 2048 // block_d)
        _merge[(triton.cdiv(rows, block_r),)](
            partial, lse, out, rows, D=head_dim, NUM_SPLITS=num_splits, BLOCK_R=block_r, BLOCK_D=block_d
        )
    return out


@triton.jit(do_not_specialize=["num_queries", "num_sequences", "width", "block_length"])
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, start_ptr, positions_ptr, history_ptr, listed_ptr, out_ptr, lse_ptr,
    scale, num_queries, num_sequences, width, block_length,
    q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, table_row, listed_row,
    G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of one sequence's queries, for the heads of one KV head, over one split of its keys; scale in base 2."""
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    i_head, i_split = tl.program_id(1), tl.program_id(2)
    i_s, _, first, end = tile_of(start_ptr, num_sequences, tl.program_id(0), BLOCK_Q, BLOCK_S)
    if first >= end:
        return

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_row = first + o_m // G
    m_row = (o_m // G < BLOCK_Q) & (o_row < end)
    o_row = o_row.to(tl.int64)
    o_head = i_head * G + o_m % G
    b_q = tl.load(
        q_ptr + o_row[:, None] * q_row + o_head[:, None] * q_head + o_d[None, :],
        mask=m_row[:, None] & m_d[None, :],
        other=0.0,
    )
    if WIDEN:
        b_q = b_q.to(tl.float32)
    # Keys before this one are in the query's own block or an earlier one.
    b_limit = (tl.load(positions_ptr + o_row, mask=m_row, other=-1) // block_length + 1) * block_length
    b_limit = tl.where(m_row, b_limit, 0)

    history = tl.load(history_ptr + i_s)
    o_w = tl.arange(0, BLOCK_W)
    b_listed = tl.load(listed_ptr + i_s.to(tl.int64) * listed_row + o_w, mask=o_w < width, other=0)
    num_keys = history + tl.max(tl.where(b_listed != 0, o_w + 1, 0))
    num_keys = tl.minimum(num_keys, tl.max(b_limit))
    share = tl.cdiv(tl.cdiv(num_keys, NUM_SPLITS), BLOCK_N) * BLOCK_N
    low = i_split * share
    high = tl.minimum(low + share, num_keys)

    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # First the history, all of which is offered, then what is listed of the block.
    for IN_BLOCK in tl.static_range(2):
        if IN_BLOCK:
            i_first = tl.maximum(low, history)
            i_last = high
        else:
            i_first = low
            i_last = tl.minimum(high, history)
        for i_key in range(i_first, i_last, BLOCK_N):
            o_key = i_key + tl.arange(0, BLOCK_N)
            m_key = o_key < i_last
            if IN_BLOCK:
                o_listed = i_s.to(tl.int64) * listed_row + o_key - history
                m_key = m_key & (tl.load(listed_ptr + o_listed, mask=m_key, other=0) != 0)
            b_page = tl.load(table_ptr + i_s.to(tl.int64) * table_row + o_key // PAGE, mask=m_key, other=0).to(tl.int64)
            o_slot = (o_key % PAGE).to(tl.int64)
            m_kv = m_key[:, None] & m_d[None, :]
            o_k = b_page * k_page + o_slot * k_slot + i_head * k_head
            b_k = tl.load(k_ptr + o_k[:, None] + o_d[None, :], mask=m_kv, other=0.0)
            if WIDEN:
                b_k = b_k.to(tl.float32)
            b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
            b_score = tl.where(m_key[None, :] & (o_key[None, :] < b_limit[:, None]), b_score, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_score, 1))
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_weight = tl.exp2(b_score - b_base[:, None])
            b_decay = tl.exp2(b_max - b_base)
            o_v = b_page * v_page + o_slot * v_slot + i_head * v_head
            b_v = tl.load(v_ptr + o_v[:, None] + o_d[None, :], mask=m_kv, other=0.0)
            if WIDEN:
                b_v = b_v.to(tl.float32)
            b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
            b_acc = b_acc * b_decay[:, None] + tl.dot(b_weight.to(b_v.dtype), b_v, input_precision="ieee")
            b_max = b_new

    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)  # a query that sees no key
    b_out = b_acc / b_sum[:, None]
    o_out = (i_split.to(tl.int64) * num_queries + o_row) * (tl.num_programs(1) * G) + o_head
    m_out = m_row[:, None] & m_d[None, :]
    tl.store(out_ptr + o_out[:, None] * D + o_d[None, :], b_out.to(out_ptr.dtype.element_ty), mask=m_out)
    if NUM_SPLITS > 1:
        tl.store(lse_ptr + o_out, b_max + tl.log2(b_sum), mask=m_row)


@triton.jit(do_not_specialize=["num_rows"])
def _merge(
    partial_ptr, lse_ptr, out_ptr, num_rows,
    D: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The splits of some rows (a query's head each) put together, always in the same order."""
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    m_r = o_r < num_rows
    m_out = m_r[:, None] & (o_d < D)[None, :]
    b_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_R], tl.float32)
    b_acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for i_split in range(NUM_SPLITS):
        o_row = i_split * num_rows + o_r
        b_lse = tl.load(lse_ptr + o_row, mask=m_r, other=float("-inf"))
        b_new = tl.maximum(b_max, b_lse)
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight = tl.exp2(b_lse - b_base)
        b_decay = tl.exp2(b_max - b_base)
        b_part = tl.load(partial_ptr + o_row[:, None] * D + o_d[None, :], mask=m_out, other=0.0)
        b_sum = b_sum * b_decay + b_weight
        b_acc = b_acc * b_decay[:, None] + b_weight[:, None] * b_part
        b_max = b_new
    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    tl.store(out_ptr + o_r[:, None] * D + o_d[None, :], b_out.to(out_ptr.dtype.element_ty), mask=m_out)
