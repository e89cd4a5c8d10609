"""FOCUS's selection in Triton: one program a sequence, which never reads its outputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import Masks

BLOCK = 64


def focus_select(
    importance_first: Tensor, importance_second: Tensor, masks: Masks, alpha: float, sample_deviation: bool
) -> tuple[Tensor, Tensor]:
    retained = torch.ones(len(masks.positions), dtype=torch.bool, device=masks.positions.device)
    progress_after = torch.empty_like(masks.progress)
    if len(masks.progress):
        # No fused multiply-add: products and sums are rounded separately, as in NumPy.
        _select[(len(masks.progress),)](
            importance_first, importance_second, *masks, retained, progress_after,
            ALPHA=float(alpha), SAMPLE=int(sample_deviation), BLOCK=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return retained, progress_after


@triton.jit
def _delta(first_ptr, second_ptr, o, m):
    return tl.load(second_ptr + o, mask=m, other=0.0) - tl.load(first_ptr + o, mask=m, other=0.0)


@triton.jit
def _rank(first_ptr, second_ptr, o, start, end, BLOCK: tl.constexpr):
    """How many of the sequence's masked tokens have a higher delta, or the same further left."""
    b_delta = _delta(first_ptr, second_ptr, o, o < end)
    b_rank = tl.zeros([BLOCK], tl.int32)
    for i in range(start, end, BLOCK):
        o_other = i + tl.arange(0, BLOCK)
        b_other = _delta(first_ptr, second_ptr, o_other, o_other < end)
        m_tie = (b_other[None, :] == b_delta[:, None]) & (o_other[None, :] < o[:, None])
        m_before = ((b_other[None, :] > b_delta[:, None]) | m_tie) & (o_other < end)[None, :]
        b_rank += tl.sum(m_before.to(tl.int32), 1)
    return b_rank


@triton.jit
def _kept(first_ptr, second_ptr, masked_ptr, positions_ptr, o, start, end, num_selected, BLOCK: tl.constexpr):
    """Whether each is selected or left of a selected one; their rows and positions."""
    m = o < end
    o_row = tl.load(masked_ptr + o, mask=m, other=0)
    b_position = tl.load(positions_ptr + o_row, mask=m, other=-1)
    m_next = o + 1 < end
    b_next = tl.load(positions_ptr + tl.load(masked_ptr + o + 1, mask=m_next, other=0), mask=m_next, other=-1)
    m_selected = m & (_rank(first_ptr, second_ptr, o, start, end, BLOCK) < num_selected)
    m_context = m_next & (_rank(first_ptr, second_ptr, o + 1, start, end, BLOCK) < num_selected)
    return m_selected | (m_context & (b_next == b_position + 1)), o_row, b_position


@triton.jit
def _select(
    first_ptr, second_ptr, masked_ptr, start_ptr, positions_ptr, decoded_ptr, steps_ptr, progress_ptr,
    retained_ptr, progress_after_ptr, ALPHA: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_s = tl.program_id(0)
    start = tl.load(start_ptr + i_s)
    end = tl.load(start_ptr + i_s + 1)
    num_masked = end - start
    progress = tl.load(progress_ptr + i_s)

    # Sums go from left to right: all implementations give the same bits.
    mean = tl.full([], 0.0, tl.float64)
    for i in range(start, end):
        mean += _delta(first_ptr, second_ptr, i, True).to(tl.float64)
    mean = mean / tl.maximum(num_masked, 1).to(tl.float64)
    variance = tl.full([], 0.0, tl.float64)
    for i in range(start, end):
        off = _delta(first_ptr, second_ptr, i, True).to(tl.float64) - mean
        variance += off * off
    high = mean + tl.sqrt(variance / tl.maximum(num_masked - SAMPLE, 1).to(tl.float64))

    num_steps = tl.load(steps_ptr + i_s)
    decoded = tl.load(decoded_ptr + i_s).to(tl.float64) / tl.maximum(num_steps, 1).to(tl.float64)
    one = tl.full([], 1.0, tl.float64)
    decoded = tl.where(num_steps > 0, tl.maximum(decoded, one), one)
    target = tl.ceil(decoded * tl.full([], ALPHA, tl.float64))
    budget = tl.minimum(target, num_masked.to(tl.float64)).to(tl.int32)

    num_high = tl.zeros([BLOCK], tl.int32)
    for i in range(start, end, BLOCK):
        o = i + tl.arange(0, BLOCK)
        num_high += ((o < end) & (_delta(first_ptr, second_ptr, o, o < end).to(tl.float64) >= high)).to(tl.int32)
    num_selected = tl.maximum(tl.sum(num_high), budget)
    num_selected = tl.where(num_masked <= budget, num_masked, num_selected)

    b_rightmost = tl.full([BLOCK], -1, tl.int32)
    for i in range(start, end, BLOCK):
        o = i + tl.arange(0, BLOCK)
        m_kept, _, b_position = _kept(
            first_ptr, second_ptr, masked_ptr, positions_ptr, o, start, end, num_selected, BLOCK
        )
        b_rightmost = tl.maximum(b_rightmost, tl.where(m_kept, b_position, -1))
    rightmost = tl.max(b_rightmost)
    for i in range(start, end, BLOCK):
        o = i + tl.arange(0, BLOCK)
        m_kept, o_row, b_position = _kept(
            first_ptr, second_ptr, masked_ptr, positions_ptr, o, start, end, num_selected, BLOCK
        )
        m_kept = m_kept | ((b_position < rightmost) & (b_position > progress))
        tl.store(retained_ptr + o_row, m_kept, mask=o < end)
    tl.store(progress_after_ptr + i_s, tl.maximum(rightmost, progress))
