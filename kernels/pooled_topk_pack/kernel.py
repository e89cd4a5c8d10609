"""Choosing and packing in Triton: a key's rank is its slot."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..tiles import num_tiles, tile_of
from . import Choice

BLOCK = 64  # keys at a time


def pooled_topk_pack(q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, choice: Choice) -> Tensor:
    query_start, key_start, block_start, num_kept, page_table, pool, shared = choice
    num_keys, num_kv_heads, head_dim = k.shape
    num_sequences, num_heads = len(num_kept), q.shape[1]
    choosing = 1 if shared else num_kv_heads
    slots = page_table.shape[1] * k_pages.shape[1]
    indices = torch.full((choosing, num_sequences, slots), -1, dtype=torch.int32, device=k.device)
    if num_keys == 0:
        return indices
    query = k.new_empty((num_sequences, num_heads, head_dim), dtype=torch.float32)
    scores, pooled = (k.new_empty((choosing, num_keys), dtype=torch.float32) for _ in range(2))
    block_d = triton.next_power_of_2(head_dim)
    grid = (num_tiles(num_keys, num_sequences, BLOCK), choosing)
    _mean_queries[(num_sequences, num_heads)](q, query_start, query, *q.stride()[:2], D=head_dim, BLOCK_D=block_d)
    _scores[grid](
        query, k, key_start, scores, num_keys, num_sequences, num_heads, *k.stride()[:2],
        G=num_heads // num_kv_heads, D=head_dim, SHARED=shared, BLOCK=BLOCK, BLOCK_D=block_d,
    )  # fmt: skip
    _pool[grid](scores, query_start, key_start, block_start, pooled, num_keys, num_sequences, POOL=pool, BLOCK=BLOCK)
    _pack[grid](
        pooled, k, v, query_start, key_start, block_start, num_kept, k_pages, v_pages, page_table, indices,
        num_keys, num_sequences, slots, *k.stride()[:2], *v.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3],
        page_table.stride(0),
        HEADS=num_kv_heads if shared else 1, D=head_dim, PAGE=k_pages.shape[1],
        BLOCK=BLOCK, BLOCK_D=block_d,
    )  # fmt: skip
    return indices


@triton.jit
def _mean_queries(q_ptr, start_ptr, query_ptr, q_row, q_head, D: constexpr, BLOCK_D: constexpr):
    i_s, i_head = tl.program_id(0), tl.program_id(1)
    start = tl.load(start_ptr + i_s)
    end = tl.load(start_ptr + i_s + 1)
    o_d = tl.arange(0, BLOCK_D)
    b_sum = tl.zeros([BLOCK_D], tl.float32)
    q_ptr += start.to(tl.int64) * q_row + i_head * q_head
    for i in range(0, end - start):
        b_sum += tl.load(q_ptr + i * q_row + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    o = (i_s * tl.num_programs(1) + i_head).to(tl.int64) * D
    tl.store(query_ptr + o + o_d, tl.div_rn(b_sum, tl.maximum(end - start, 1).to(tl.float32)), mask=o_d < D)


@triton.jit(do_not_specialize=["num_keys", "num_sequences"])
def _scores(
    query_ptr, k_ptr, start_ptr, scores_ptr, num_keys, num_sequences, num_heads, k_row, k_head,
    G: constexpr, D: constexpr, SHARED: constexpr,
    BLOCK: constexpr, BLOCK_D: constexpr,
):  # fmt: skip
    """Scores of a tile of keys, merged over all heads in order, or over one group."""
    i_choosing = tl.program_id(1)
    i_s, _, first, end = tile_of(start_ptr, num_sequences, tl.program_id(0), BLOCK)
    if first >= end:
        return
    o_key = first + tl.arange(0, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    m = (o_key < end)[:, None] & (o_d < D)[None, :]
    if SHARED:
        first_head = 0
        last_head = num_heads
        b_merged = tl.zeros([BLOCK], tl.float32)
    else:
        first_head = i_choosing * G
        last_head = first_head + G
        b_merged = tl.full([BLOCK], float("-inf"), tl.float32)
    for i_head in range(first_head, last_head):
        b_query = tl.load(query_ptr + (i_s * num_heads + i_head) * D + o_d, mask=o_d < D, other=0.0)
        o_k = o_key.to(tl.int64) * k_row + (i_head // G) * k_head
        b_k = tl.load(k_ptr + o_k[:, None] + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_score = tl.sum(b_k * b_query[None, :], 1)
        if SHARED:
            b_merged += b_score
        else:
            b_merged = tl.maximum(b_merged, b_score)
    tl.store(scores_ptr + i_choosing.to(tl.int64) * num_keys + o_key, b_merged, mask=o_key < end)


@triton.jit
def _candidates(query_start_ptr, key_start_ptr, block_start_ptr, num_sequences, BLOCK: constexpr):
    """A tile of a sequence's candidates: their indices and number, the block's start and length, the first key."""
    i_s, start, first, end = tile_of(key_start_ptr, num_sequences, tl.program_id(0), BLOCK)
    block = tl.load(query_start_ptr + i_s + 1) - tl.load(query_start_ptr + i_s)
    o = first - start + tl.arange(0, BLOCK)
    return i_s, o, end - start - block, tl.load(block_start_ptr + i_s), block, start


@triton.jit(do_not_specialize=["num_keys", "num_sequences"])
def _pool(
    scores_ptr, query_start_ptr, key_start_ptr, block_start_ptr, pooled_ptr, num_keys, num_sequences,
    POOL: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Pooled scores of a tile of candidates, stored as if the block were cut out of the sequence."""
    _, o, num, block_start, block, start = _candidates(
        query_start_ptr, key_start_ptr, block_start_ptr, num_sequences, BLOCK
    )
    o_head = tl.program_id(1).to(tl.int64) * num_keys + start
    b_pooled = tl.full([BLOCK], float("-inf"), tl.float32)
    for i in tl.static_range(POOL):
        o_near = o + (i - POOL // 2)
        m = (o_near >= 0) & (o_near < num)
        o_key = tl.where(o_near < block_start, o_near, o_near + block)
        b_pooled = tl.maximum(b_pooled, tl.load(scores_ptr + o_head + o_key, mask=m, other=float("-inf")))
    tl.store(pooled_ptr + o_head + o, b_pooled, mask=o < num)


@triton.jit(do_not_specialize=["num_keys", "num_sequences", "slots", "table_row"])
def _pack(
    pooled_ptr, k_ptr, v_ptr, query_start_ptr, key_start_ptr, block_start_ptr, num_kept_ptr,
    k_pages_ptr, v_pages_ptr, table_ptr, kept_ptr, num_keys, num_sequences, slots,
    k_row, k_head, v_row, v_head, k_page, k_slot, k_page_head, v_page, v_slot, v_page_head, table_row,
    HEADS: constexpr, D: constexpr, PAGE: constexpr,
    BLOCK: constexpr, BLOCK_D: constexpr,
):  # fmt: skip
    """Rank a tile of candidates among all; write the kept ones, of HEADS heads, to the slots of their ranks."""
    i_choosing = tl.program_id(1)
    i_s, o, num, block_start, block, start = _candidates(
        query_start_ptr, key_start_ptr, block_start_ptr, num_sequences, BLOCK
    )
    num_kept = tl.load(num_kept_ptr + i_s)
    m = o < num
    o_head = i_choosing.to(tl.int64) * num_keys + start
    b_own = tl.load(pooled_ptr + o_head + o, mask=m, other=float("-inf"))
    b_rank = tl.zeros([BLOCK], tl.int32)
    for i in range(0, num, BLOCK):
        o_other = i + tl.arange(0, BLOCK)
        b_other = tl.load(pooled_ptr + o_head + o_other, mask=o_other < num, other=float("-inf"))
        m_tie = (b_other[None, :] == b_own[:, None]) & (o_other[None, :] < o[:, None])
        m_before = ((b_other[None, :] > b_own[:, None]) | m_tie) & (o_other < num)[None, :]
        b_rank += tl.sum(m_before.to(tl.int32), 1)

    m = m & (b_rank < num_kept)
    o_key = tl.where(o < block_start, o, o + block)
    o_kept = (i_choosing * num_sequences + i_s).to(tl.int64) * slots
    tl.store(kept_ptr + o_kept + b_rank, o_key, mask=m)
    b_page = tl.load(table_ptr + i_s.to(tl.int64) * table_row + b_rank // PAGE, mask=m, other=0).to(tl.int64)
    o_slot = (b_rank % PAGE).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = m[:, None] & (o_d < D)[None, :]
    o_row = (start + o_key).to(tl.int64)
    for i in range(HEADS):
        i_head = i_choosing + i
        o_k = o_row * k_row + i_head * k_head
        o_v = o_row * v_row + i_head * v_head
        to_k = b_page * k_page + o_slot * k_slot + i_head * k_page_head
        to_v = b_page * v_page + o_slot * v_slot + i_head * v_page_head
        b_k = tl.load(k_ptr + o_k[:, None] + o_d[None, :], mask=m_d)
        b_v = tl.load(v_ptr + o_v[:, None] + o_d[None, :], mask=m_d)
        tl.store(k_pages_ptr + to_k[:, None] + o_d[None, :], b_k, mask=m_d)
        tl.store(v_pages_ptr + to_v[:, None] + o_d[None, :], b_v, mask=m_d)
