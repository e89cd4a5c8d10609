"""MaskKV's votes in Triton: row sums, then column sums; no weights are stored."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import interpreted
from ..tiles import num_tiles, rows_of, tile_of

BLOCK_M = 32  # masked queries at a time
BLOCK_N = 64  # keys at a time


def mask_vote(
    q: Tensor, k: Tensor, masked: Tensor, masked_start: Tensor, key_start: Tensor, num_prompt: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    num_keys, num_kv_heads, head_dim = k.shape
    num_masked, num_sequences, num_heads = len(masked), len(num_prompt), q.shape[1]
    lse = torch.empty((num_heads, num_masked), dtype=torch.float32, device=q.device)
    votes = torch.empty((num_kv_heads, num_keys), dtype=torch.float32, device=q.device)
    shape = (num_sequences, num_kv_heads)
    to_prompt, to_masked = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    if num_sequences == 0:
        return votes, to_prompt, to_masked
    arguments = (
        q, k, masked, masked_start, key_start, lse, votes, scale * 1.4426950408889634, num_masked, num_keys,
        num_sequences, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
    )  # fmt: skip
    sizes = {
        "G": num_heads // num_kv_heads, "D": head_dim, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)), "WIDEN": interpreted(q),
    }  # fmt: skip
    if num_masked:
        _row_sums[(num_tiles(num_masked, num_sequences, BLOCK_M), num_heads)](*arguments, **sizes)
    if num_keys:
        _column_sums[(num_tiles(num_keys, num_sequences, BLOCK_N), num_kv_heads)](*arguments, **sizes)
    _preferences[shape](votes, masked, masked_start, key_start, num_prompt, to_prompt, to_masked, num_keys, BLOCK=1024)
    return votes, to_prompt, to_masked


@triton.jit(do_not_specialize=["num_masked", "num_keys", "num_sequences"])
def _row_sums(
    q_ptr, k_ptr, masked_ptr, masked_start_ptr, key_start_ptr, lse_ptr, votes_ptr, scale, num_masked, num_keys,
    num_sequences, q_row, q_head, k_row, k_head,
    G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The base-2 log of each masked query's sum of exponentials, for one query head and a tile of queries."""
    i_head = tl.program_id(1)
    i_s, _, first, end = tile_of(masked_start_ptr, num_sequences, tl.program_id(0), BLOCK_M)
    if first >= end:
        return
    o_m = first + tl.arange(0, BLOCK_M)
    o_row = tl.load(masked_ptr + o_m, mask=o_m < end, other=0)
    b_q = rows_of(q_ptr + i_head * q_head, o_row, o_m < end, q_row, D, BLOCK_D, WIDEN)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    last = tl.load(key_start_ptr + i_s + 1)
    for i_key in range(tl.load(key_start_ptr + i_s), last, BLOCK_N):
        o_key = i_key + tl.arange(0, BLOCK_N)
        b_k = rows_of(k_ptr + (i_head // G) * k_head, o_key, o_key < last, k_row, D, BLOCK_D, WIDEN)
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        b_score = tl.where((o_key < last)[None, :], b_score, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_score, 1))
        b_sum = b_sum * tl.exp2(b_max - b_new) + tl.sum(tl.exp2(b_score - b_new[:, None]), 1)
        b_max = b_new
    tl.store(lse_ptr + i_head.to(tl.int64) * num_masked + o_m, b_max + tl.log2(b_sum), mask=o_m < end)


@triton.jit(do_not_specialize=["num_masked", "num_keys", "num_sequences"])
def _column_sums(
    q_ptr, k_ptr, masked_ptr, masked_start_ptr, key_start_ptr, lse_ptr, votes_ptr, scale, num_masked, num_keys,
    num_sequences, q_row, q_head, k_row, k_head,
    G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The attention that a tile of keys gets from all masked queries of its sequence, over one KV head."""
    i_head = tl.program_id(1)
    i_s, _, first, end = tile_of(key_start_ptr, num_sequences, tl.program_id(0), BLOCK_N)
    if first >= end:
        return
    o_key = first + tl.arange(0, BLOCK_N)
    b_k = rows_of(k_ptr + i_head * k_head, o_key, o_key < end, k_row, D, BLOCK_D, WIDEN)
    b_votes = tl.zeros([BLOCK_N], tl.float32)
    first_masked = tl.load(masked_start_ptr + i_s)
    last = tl.load(masked_start_ptr + i_s + 1)
    for i_group in range(G):
        i_query_head = i_head * G + i_group
        for i_m in range(first_masked, last, BLOCK_M):
            o_m = i_m + tl.arange(0, BLOCK_M)
            o_row = tl.load(masked_ptr + o_m, mask=o_m < last, other=0)
            b_q = rows_of(q_ptr + i_query_head * q_head, o_row, o_m < last, q_row, D, BLOCK_D, WIDEN)
            o_lse = i_query_head.to(tl.int64) * num_masked + o_m
            b_lse = tl.load(lse_ptr + o_lse, mask=o_m < last, other=float("inf"))
            b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
            b_votes += tl.sum(tl.exp2(b_score - b_lse[:, None]), 0)
    tl.store(votes_ptr + i_head.to(tl.int64) * num_keys + o_key, b_votes, mask=o_key < end)


@triton.jit(do_not_specialize=["num_keys"])
def _preferences(
    votes_ptr, masked_ptr, masked_start_ptr, key_start_ptr, num_prompt_ptr, to_prompt_ptr, to_masked_ptr, num_keys,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A sequence's votes for its prompt and its masked tokens, for one KV head."""
    i_s, i_head = tl.program_id(0), tl.program_id(1)
    votes_ptr += i_head.to(tl.int64) * num_keys
    first = tl.load(key_start_ptr + i_s)
    last = first + tl.load(num_prompt_ptr + i_s)
    first_masked = tl.load(masked_start_ptr + i_s)
    last_masked = tl.load(masked_start_ptr + i_s + 1)
    b_prompt = tl.zeros([BLOCK], tl.float32)
    for i in range(first, last, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_prompt += tl.load(votes_ptr + o, mask=o < last, other=0.0)
    b_masked = tl.zeros([BLOCK], tl.float32)
    for i in range(first_masked, last_masked, BLOCK):
        o = i + tl.arange(0, BLOCK)
        o_row = tl.load(masked_ptr + o, mask=o < last_masked, other=0)
        b_masked += tl.load(votes_ptr + o_row, mask=o < last_masked, other=0.0)
    o_out = i_s * tl.num_programs(1) + i_head
    tl.store(to_prompt_ptr + o_out, tl.sum(b_prompt))
    tl.store(to_masked_ptr + o_out, tl.sum(b_masked))
