"""The most probable token and its probability in Triton: an online soft-max with one exponential a logit."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from ..device import logits_of, num_multiprocessors
from ..tiles import strided

CHUNK = 1024  # rows of logits at once
SPLITS = tl.constexpr(256)  # of a row, merged together
RUN = 8  # neighbouring logits of a lane: 128 bits of bf16
SHARE = 256  # a program's share of a row is a multiple
LOWEST = tl.constexpr(-3.4028234663852886e38)  # no logit yet: differences with it are never NaN


class Pass(NamedTuple):
    """How the pass over logits is compiled; benchmarks/kernel_ceilings.py --tune times others."""

    block: int = 4096  # logits at a time
    num_warps: int = 8
    programs: int = 8  # on a multiprocessor: rows are split until it has them


def confidence(
    logits: Tensor, temperature: float, num_splits: int | None = None, how: Pass | None = None
) -> tuple[Tensor, Tensor]:
    how = how or Pass()
    num_rows, num_tokens = logits.shape
    if num_splits is None:
        num_splits = how.programs * num_multiprocessors(logits.device) // max(num_rows, 1)
    num_splits = max(1, min(num_splits, triton.cdiv(num_tokens, how.block)))
    share = triton.cdiv(triton.cdiv(num_tokens, num_splits), SHARE) * SHARE
    scale = 1.4426950408889634 / (temperature or 1.0)  # from logits to exponents of two
    best, total = (logits.new_empty((num_rows, num_splits), dtype=torch.float32) for _ in range(2))
    # By row and split: the highest logit, the sum of exponentials relative to it, and its token.
    split = best, total, logits.new_empty((num_rows, num_splits), dtype=torch.int32)
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    probabilities = logits.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        _of_logits[(num_rows, num_splits)](
            strided(logits), split, (num_tokens, share), scale, LANES=how.block // RUN, RUN=RUN, num_warps=how.num_warps
        )
        _merge[(num_rows,)](split, tokens, probabilities, num_splits, scale)
    return tokens, probabilities


def confidence_of_hidden(
    hidden: Tensor, head: Tensor, temperature: float, max_num_logits: int
) -> tuple[Tensor, Tensor]:
    parts = [confidence(logits_of(rows, head), temperature) for rows in hidden.split(min(CHUNK, max_num_logits))]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([sure for _, sure in parts])


@triton.jit
def _of_logits(logits, split, sizes, scale, LANES: constexpr, RUN: constexpr):
    """One row's share of the vocabulary: each lane keeps a maximum, a sum, and where the maximum's run began."""
    num_tokens, share = sizes
    best_ptr, total_ptr, token_ptr = split
    i_row = tl.program_id(0).to(tl.int64)
    low = tl.program_id(1) * share
    high = tl.minimum(low + share, num_tokens)
    logits_ptr = logits.ptr + i_row * logits.strides[0]
    o_lane = tl.arange(0, LANES) * RUN
    o_run = tl.arange(0, RUN)[None, :]
    b_best = tl.full([LANES], LOWEST, tl.float32)
    b_total = tl.zeros([LANES], tl.float32)
    b_first = low + o_lane
    for i in range(low, high, LANES * RUN):
        o_token = (i + o_lane)[:, None] + o_run
        b_logit = tl.load(logits_ptr + o_token, mask=o_token < high, other=float("-inf")).to(tl.float32)
        b_highest = tl.max(b_logit, 1)
        b_first = tl.where(b_highest > b_best, i + o_lane, b_first)
        b_new = tl.maximum(b_best, b_highest)
        b_total = b_total * tl.exp2((b_best - b_new) * scale)
        b_total += tl.sum(tl.exp2((b_logit - b_new[:, None]) * scale), 1)
        b_best = b_new
    best = tl.max(b_best)
    # Lanes kept only the run of the maximum: look for its token again.
    o_token = b_first[:, None] + o_run
    m_best = (b_best == best)[:, None] & (o_token < high)
    b_logit = tl.load(logits_ptr + o_token, mask=m_best, other=float("-inf")).to(tl.float32)
    o_out = i_row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + o_out, best)
    tl.store(total_ptr + o_out, tl.sum(b_total * tl.exp2((b_best - best) * scale)))
    tl.store(token_ptr + o_out, tl.min(tl.where(m_best & (b_logit == best), o_token, 2147483647)))


@triton.jit(do_not_specialize=["num_splits"])
def _merge(split, tokens_ptr, probabilities_ptr, num_splits, scale):
    best_ptr, total_ptr, token_ptr = split
    i_row = tl.program_id(0)
    first = i_row.to(tl.int64) * num_splits
    # Each lane keeps the best of its splits; a later one must be better to replace it.
    b_best = tl.full([SPLITS], LOWEST, tl.float32)
    b_total = tl.zeros([SPLITS], tl.float32)
    b_token = tl.full([SPLITS], 2147483647, tl.int32)
    for i in range(0, num_splits, SPLITS):
        o = i + tl.arange(0, SPLITS)
        m = o < num_splits
        b_other = tl.load(best_ptr + first + o, mask=m, other=LOWEST)
        b_other_token = tl.load(token_ptr + first + o, mask=m, other=2147483647)
        b_new = tl.maximum(b_best, b_other)
        b_total = b_total * tl.exp2((b_best - b_new) * scale)
        b_total += tl.load(total_ptr + first + o, mask=m, other=0.0) * tl.exp2((b_other - b_new) * scale)
        b_token = tl.where((b_other > b_best) | (i == 0), b_other_token, b_token)
        b_best = b_new
    best = tl.max(b_best)
    total = tl.sum(b_total * tl.exp2((b_best - best) * scale))
    # Without a finite maximum there is neither a probability nor a token.
    m_none = (total == 0.0) | (total != total)
    token = tl.min(tl.where(b_best == best, b_token, 2147483647)).to(tl.int64)
    tl.store(tokens_ptr + i_row, tl.where(m_none, 0, token))
    tl.store(probabilities_ptr + i_row, 1.0 / tl.where(m_none, float("nan"), total))
