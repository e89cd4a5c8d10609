"""Routing in Triton: a program a row, with scores in the registers of one warp."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr


def route_experts(
    logits: Tensor, bias: Tensor | None, top_k: int, scoring: str, groups: int, top_groups: int, normed: bool,
    scale: float, expert_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_rows, num = logits.shape
    chosen = logits.new_empty((num_rows, top_k), dtype=torch.int64)
    weights = logits.new_empty((num_rows, top_k), dtype=torch.float32)
    if num_rows:
        # A group is a row of the block; lanes beyond its experts, and rows beyond the groups, are never chosen.
        _route[(num_rows,)](
            logits, logits if bias is None else bias, logits if expert_scale is None else expert_scale, chosen,
            weights, logits.stride(0), scale,
            GROUPS=groups, SIZE=num // groups, TOP_GROUPS=top_groups, TOP_K=top_k, SIGMOID=scoring == "sigmoid",
            BIAS=bias is not None, EXPERT_SCALE=expert_scale is not None, NORMED=normed and top_k > 1,
            BLOCK_G=triton.next_power_of_2(groups), BLOCK_S=triton.next_power_of_2(num // groups),
            BLOCK_K=triton.next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
    return chosen, weights


@triton.jit
def _route(
    logits_ptr, bias_ptr, expert_scale_ptr, chosen_ptr, weights_ptr, row, scale,
    GROUPS: constexpr, SIZE: constexpr, TOP_GROUPS: constexpr, TOP_K: constexpr, SIGMOID: constexpr,
    BIAS: constexpr, EXPERT_SCALE: constexpr, NORMED: constexpr, BLOCK_G: constexpr,
    BLOCK_S: constexpr, BLOCK_K: constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_g, o_s, o_k = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_K)
    o_e = o_g[:, None] * SIZE + o_s[None, :]
    m = (o_g < GROUPS)[:, None] & (o_s < SIZE)[None, :]
    b_logit = tl.load(logits_ptr + i_row * row + o_e, mask=m, other=float("-inf"))
    if SIGMOID:
        b_score = 1.0 / (1.0 + tl.exp(-b_logit))
    else:
        b_power = tl.exp(b_logit - tl.max(tl.max(b_logit, 1), 0))
        b_score = b_power / tl.sum(tl.sum(b_power, 1), 0)
    b_preferred = b_score
    if BIAS:
        b_preferred += tl.load(bias_ptr + o_e, mask=m, other=0.0)
    b_preferred = tl.where(m, b_preferred, float("-inf"))
    if GROUPS > 1:
        b_best = tl.max(b_preferred, 1)
        b_first = tl.min(tl.where(b_preferred == b_best[:, None], o_s[None, :], BLOCK_S), 1)
        b_second = tl.max(tl.where(o_s[None, :] == b_first[:, None], float("-inf"), b_preferred), 1)
        b_sum = tl.where(o_g < GROUPS, b_best + b_second, float("-inf"))
        m_in = o_g < 0
        for _ in tl.static_range(TOP_GROUPS):
            b_left = tl.where(m_in, float("-inf"), b_sum)
            i_best = tl.min(tl.where((b_left == tl.max(b_left, 0)) & (o_g < GROUPS) & (m_in == 0), o_g, BLOCK_G), 0)
            m_in = m_in | (o_g == i_best)
        b_preferred = tl.where(m_in[:, None], b_preferred, float("-inf"))
    b_chosen = tl.zeros([BLOCK_K], tl.int64)
    b_weight = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(tl.max(b_preferred, 1), 0)
        i_e = tl.min(tl.min(tl.where(m & (b_preferred == best), o_e, GROUPS * SIZE - 1), 1), 0)
        b_chosen = tl.where(o_k == i, i_e.to(tl.int64), b_chosen)
        b_weight = tl.where(o_k == i, tl.sum(tl.sum(tl.where(m & (o_e == i_e), b_score, 0.0), 1), 0), b_weight)
        b_preferred = tl.where(o_e == i_e, float("-inf"), b_preferred)
    if NORMED:
        b_weight = b_weight / (tl.sum(b_weight, 0) + 1e-20)
    if EXPERT_SCALE:
        b_weight *= tl.load(expert_scale_ptr + b_chosen)
    tl.store(chosen_ptr + i_row * TOP_K + o_k, b_chosen, mask=o_k < TOP_K)
    tl.store(weights_ptr + i_row * TOP_K + o_k, b_weight * scale, mask=o_k < TOP_K)
