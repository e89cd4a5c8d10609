"""Choosing and packing in Triton: a key's rank is its slot."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..tiles import num_tiles, strided, tile_of
from . import Choice

BLOCK = tl.constexpr(64)  # keys at a time


class Sizes(NamedTuple):
    """What a launch is compiled for."""

    heads: int  # of keys
    group: int  # heads of queries for one of keys
    head_dim: int
    width: int  # of a head, padded
    page: int
    pool: int
    shared: bool


def pooled_topk_pack(q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, choice: Choice) -> Tensor:
    num_keys, num_kv_heads, head_dim = k.shape
    num_sequences = len(choice.num_kept)
    choosing = 1 if choice.shared else num_kv_heads
    slots = choice.page_table.shape[1] * k_pages.shape[1]
    indices = torch.full((choosing, num_sequences, slots), -1, dtype=torch.int32, device=k.device)
    if num_keys == 0:
        return indices
    query = torch.segment_reduce(q.float(), "mean", offsets=choice.query_start)  # [S, H, D]
    scores, pooled = (k.new_empty((choosing, num_keys), dtype=torch.float32) for _ in range(2))
    sizes = Sizes(
        heads=num_kv_heads,
        group=q.shape[1] // num_kv_heads,
        head_dim=head_dim,
        width=triton.next_power_of_2(head_dim),
        page=k_pages.shape[1],
        pool=choice.pool,
        shared=choice.shared,
    )
    grid = (num_tiles(num_keys, num_sequences, BLOCK.value), choosing)
    choice = choice._replace(page_table=choice.page_table.contiguous())
    _scores[grid](query, strided(k), choice, scores, num_keys, num_sequences, sizes)
    _pool[grid](scores, choice, pooled, num_keys, num_sequences, sizes)
    stores = (strided(k), strided(v)), (strided(k_pages), strided(v_pages))
    num_pages = choice.page_table.shape[1]
    _pack[grid]((pooled, indices), choice, stores, num_keys, num_sequences, num_pages, sizes)
    return indices


@triton.jit(do_not_specialize=["num_keys", "num_sequences"])
def _scores(query_ptr, k, choice, scores_ptr, num_keys, num_sequences, sizes: constexpr):
    """Scores of a tile of keys, merged over all heads in order, or over one group."""
    G: constexpr = sizes.group
    i_choosing = tl.program_id(1)
    i_s, _, first, end = tile_of(choice.key_start, num_sequences, tl.program_id(0), BLOCK)
    if first >= end:
        return
    o_key = first + tl.arange(0, BLOCK)
    o_d = tl.arange(0, sizes.width)
    m_d = o_d < sizes.head_dim
    m = (o_key < end)[:, None] & m_d[None, :]
    if sizes.shared:
        first_head = 0
        last_head = sizes.heads * G
        b_merged = tl.zeros([BLOCK], tl.float32)
    else:
        first_head = i_choosing * G
        last_head = first_head + G
        b_merged = tl.full([BLOCK], float("-inf"), tl.float32)
    for i_head in range(first_head, last_head):
        o_query = (i_s * sizes.heads * G + i_head) * sizes.head_dim + o_d
        b_query = tl.load(query_ptr + o_query, mask=m_d, other=0.0)
        o_k = o_key.to(tl.int64) * k.strides[0] + (i_head // G) * k.strides[1]
        b_k = tl.load(k.ptr + o_k[:, None] + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b_score = tl.sum(b_k * b_query[None, :], 1)
        if sizes.shared:
            b_merged += b_score
        else:
            b_merged = tl.maximum(b_merged, b_score)
    tl.store(scores_ptr + i_choosing.to(tl.int64) * num_keys + o_key, b_merged, mask=o_key < end)


@triton.jit
def _candidates(choice, num_sequences):
    """A tile of a sequence's candidates: their indices and number, the block's start and length, the first key."""
    i_s, start, first, end = tile_of(choice.key_start, num_sequences, tl.program_id(0), BLOCK)
    block = tl.load(choice.query_start + i_s + 1) - tl.load(choice.query_start + i_s)
    o = first - start + tl.arange(0, BLOCK)
    return i_s, o, end - start - block, tl.load(choice.block_start + i_s), block, start


@triton.jit(do_not_specialize=["num_keys", "num_sequences"])
def _pool(scores_ptr, choice, pooled_ptr, num_keys, num_sequences, sizes: constexpr):
    """Pooled scores of a tile of candidates, stored as if the block were cut out of the sequence."""
    _, o, num, block_start, block, start = _candidates(choice, num_sequences)
    o_head = tl.program_id(1).to(tl.int64) * num_keys + start
    b_pooled = tl.full([BLOCK], float("-inf"), tl.float32)
    for i in tl.static_range(sizes.pool):
        o_near = o + (i - sizes.pool // 2)
        m = (o_near >= 0) & (o_near < num)
        o_key = tl.where(o_near < block_start, o_near, o_near + block)
        b_pooled = tl.maximum(b_pooled, tl.load(scores_ptr + o_head + o_key, mask=m, other=float("-inf")))
    tl.store(pooled_ptr + o_head + o, b_pooled, mask=o < num)


@triton.jit(do_not_specialize=["num_keys", "num_sequences", "num_pages"])
def _pack(ranks, choice, stores, num_keys, num_sequences, num_pages, sizes: constexpr):
    """Rank a tile of candidates among all; write the kept ones, of all heads that choose together, to their ranks."""
    pooled_ptr, kept_ptr = ranks
    sources, pages = stores
    i_choosing = tl.program_id(1)
    i_s, o, num, block_start, block, start = _candidates(choice, num_sequences)
    num_kept = tl.load(choice.num_kept + i_s)
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
    o_kept = (i_choosing * num_sequences + i_s).to(tl.int64) * num_pages * sizes.page
    tl.store(kept_ptr + o_kept + b_rank, o_key, mask=m)
    table_ptr = choice.page_table + i_s.to(tl.int64) * num_pages
    b_page = tl.load(table_ptr + b_rank // sizes.page, mask=m, other=0).to(tl.int64)
    o_slot = (b_rank % sizes.page).to(tl.int64)
    o_d = tl.arange(0, sizes.width)[None, :]
    m_d = m[:, None] & (o_d < sizes.head_dim)
    o_row = (start + o_key).to(tl.int64)
    num_heads: constexpr = sizes.heads if sizes.shared else 1
    for i in range(num_heads):
        for i_store in tl.static_range(2):
            x, to = sources[i_store], pages[i_store]
            o_x = o_row * x.strides[0] + (i_choosing + i) * x.strides[1]
            o_to = b_page * to.strides[0] + o_slot * to.strides[1] + (i_choosing + i) * to.strides[2]
            tl.store(to.ptr + o_to[:, None] + o_d, tl.load(x.ptr + o_x[:, None] + o_d, mask=m_d), mask=m_d)
