"""Logits read in Triton in two passes: sums of each share of a row, then probabilities over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..tiles import strided

SHARE = tl.constexpr(4096)  # tokens of a program
LOWEST = tl.constexpr(-3.4028234663852886e38)  # beyond the last token: differences with it are never NaN


def read_logits(logits: Tensor, temperature: Tensor, uniform: Tensor, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_tokens = logits.shape
    num_shares = triton.cdiv(num_tokens, SHARE.value)
    best, total, spread = (logits.new_empty((num_rows, num_shares), dtype=torch.float32) for _ in range(3))
    # By share of a row: the highest value, its token, and sums of e^d and d e^d of differences d with it.
    shares = best, logits.new_empty((num_rows, num_shares), dtype=torch.int32), total, spread
    drawn, likeliest = (logits.new_empty(num_rows, dtype=torch.int64) for _ in range(2))
    result = drawn, likeliest, logits.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        grid = num_rows, num_shares
        _sums[grid](strided(logits), temperature, shares, (num_tokens, cap), num_warps=8)
        width = triton.next_power_of_2(num_shares)
        _read[grid](strided(logits), (temperature, uniform), shares, result, (num_tokens, cap), width, num_warps=8)
    return result


@triton.jit
def _scaled(logits_ptr, o_token, num_tokens, cap, temperature):
    """Soft-capped logits at a temperature, fp32; a logit costs one division, the others are a row's."""
    m = o_token < num_tokens
    b_logit = tl.load(logits_ptr + o_token, mask=m, other=0.0).to(tl.float32)
    bound = cap / temperature
    # bound * tanh(logit / cap)
    return tl.where(m, bound - 2.0 * bound / (1.0 + tl.exp(b_logit * (2.0 / cap))), LOWEST)


@triton.jit
def _sums(logits, temperature_ptr, shares, about):
    num_tokens, cap = about
    best_ptr, token_ptr, total_ptr, spread_ptr = shares
    i_row = tl.program_id(0).to(tl.int64)
    o_token = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    b = _scaled(logits.ptr + i_row * logits.strides[0], o_token, num_tokens, cap, tl.load(temperature_ptr + i_row))
    best = tl.max(b, 0)
    b_below = tl.where(o_token < num_tokens, b - best, -100.0)
    b_weight = tl.where(o_token < num_tokens, tl.exp(b_below), 0.0)
    o_out = i_row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + o_out, best)
    tl.store(total_ptr + o_out, tl.sum(b_weight, 0))
    tl.store(spread_ptr + o_out, tl.sum(b_weight * b_below, 0))
    tl.store(token_ptr + o_out, tl.minimum(tl.min(tl.where(b == best, o_token, 2147483647), 0), num_tokens - 1))


@triton.jit
def _read(logits, rows, shares, result, about, SHARES: constexpr):
    """Write a share's probabilities; the first share also writes likeliest and entropy, the drawn share its token."""
    temperature_ptr, uniform_ptr = rows
    best_ptr, token_ptr, total_ptr, spread_ptr = shares
    drawn_ptr, likeliest_ptr, entropy_ptr = result
    num_tokens, cap = about
    num_shares = tl.num_programs(1)
    i_row, i_share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_share = tl.arange(0, SHARES)
    m_share = o_share < num_shares
    o_in = i_row * num_shares + o_share
    b_best = tl.load(best_ptr + o_in, mask=m_share, other=LOWEST)
    best = tl.max(b_best, 0)
    b_decay = tl.where(m_share, tl.exp(b_best - best), 0.0)
    b_own = tl.load(total_ptr + o_in, mask=m_share, other=0.0)
    b_total = b_own * b_decay
    total = tl.sum(b_total, 0)
    if i_share == 0:
        b_token = tl.load(token_ptr + o_in, mask=m_share, other=2147483647)
        tl.store(likeliest_ptr + i_row, tl.min(tl.where(b_best == best, b_token, num_tokens - 1), 0).to(tl.int64))
        b_spread = tl.load(spread_ptr + o_in, mask=m_share, other=0.0)
        b_spread = tl.where(m_share, (b_spread + (b_best - best) * b_own) * b_decay, 0.0)
        tl.store(entropy_ptr + i_row, tl.log(total) - tl.sum(b_spread, 0) / total)
    # The share where the cumulative sum exceeds the target, or by rounding the last with any weight.
    target = tl.load(uniform_ptr + i_row) * total
    b_reached = tl.cumsum(b_total, 0)
    last = tl.max(tl.where(b_total > 0.0, o_share, 0), 0)
    chosen = tl.minimum(tl.sum((m_share & (b_reached <= target)).to(tl.int32), 0), last)

    logits_ptr = logits.ptr + i_row * logits.strides[0]
    o_token = i_share * SHARE + tl.arange(0, SHARE)
    m = o_token < num_tokens
    b = _scaled(logits_ptr, o_token, num_tokens, cap, tl.load(temperature_ptr + i_row))
    b_weight = tl.where(m, tl.exp(b - best), 0.0)
    tl.store(logits_ptr + o_token, (b_weight * (1.0 / total)).to(logits_ptr.dtype.element_ty), mask=m)
    if i_share == chosen:
        before = tl.sum(tl.where(o_share < chosen, b_total, 0.0), 0)
        b_passed = before + tl.cumsum(b_weight, 0) <= target
        last_token = tl.max(tl.where(b_weight > 0.0, o_token, i_share * SHARE), 0)
        token = tl.minimum(i_share * SHARE + tl.sum((m & b_passed).to(tl.int32), 0), last_token)
        tl.store(drawn_ptr + i_row, token.to(tl.int64))
