"""The most probable token and its probability in Triton: an online soft-max of one exponential a logit."""

# ruff: noqa: N803

import torch
import triton
import triton.language as tl

from ..device import interpreted, num_multiprocessors

BLOCK = 4096  # logits taken at a time
PROGRAMS_PER_MULTIPROCESSOR = 8  # before a row is no longer split further. Not measured.
LOWEST = tl.constexpr(-3.4028234663852886e38)  # stands for no logit so far: differences with it are never NaN


def confidence(
    logits: torch.Tensor, temperature: float, num_splits: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the launcher."""
    num_rows, num_tokens = logits.shape
    num_blocks = triton.cdiv(num_tokens, BLOCK)
    if num_splits is None:
        num_splits = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(logits.device) // max(num_rows, 1)
    num_splits = max(1, min(num_splits, num_blocks))
    share = triton.cdiv(num_blocks, num_splits) * BLOCK
    best, total, token = _partials(num_splits, num_rows, logits.device)
    if num_rows:
        _of_logits[(num_rows, num_splits)](
            logits, best, total, token, num_rows, num_tokens, share, logits.stride(0), _scale(temperature),
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return _merged(best, total, token, temperature)


def confidence_of_hidden(
    hidden: torch.Tensor, head: torch.Tensor, temperature: float, max_num_logits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the launcher. No logits leave a program, so max_num_logits, whatever it is, is kept."""
    num_rows, width = hidden.shape
    wide = hidden.element_size() > 2
    block_r = min(max(16, triton.next_power_of_2(max(num_rows, 1))), 64 if wide else 128)
    block_v = 64 if wide else 128
    num_tiles = triton.cdiv(head.shape[0], block_v)
    best, total, token = _partials(num_tiles, num_rows, hidden.device)
    if num_rows:
        # Row tiles vary fastest: a tile of the head is read from memory once, and from the cache by the others.
        _of_hidden[(triton.cdiv(num_rows, block_r), num_tiles)](
            hidden, head, best, total, token, num_rows, head.shape[0], hidden.stride(0), head.stride(0),
            _scale(temperature), WIDTH=width, BLOCK_R=block_r, BLOCK_V=block_v, BLOCK_K=32 if wide else 64,
            WIDEN=interpreted(hidden),
            num_warps=8 if block_r == 128 else 4, num_stages=3,
        )  # fmt: skip
    return _merged(best, total, token, temperature)


def _scale(temperature: float) -> float:
    """Logits to exponents of two."""
    return 1.4426950408889634 / (temperature or 1.0)


def _partials(num_splits: int, num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each split of each row: the highest logit, the sum of exponentials relative to it, and its token."""
    best, total = (torch.empty((num_splits, num_rows), dtype=torch.float32, device=device) for _ in range(2))
    return best, total, torch.empty((num_splits, num_rows), dtype=torch.int32, device=device)


def _merged(
    best: torch.Tensor, total: torch.Tensor, token: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_splits, num_rows = best.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=best.device)
    probabilities = torch.empty(num_rows, dtype=torch.float32, device=best.device)
    if num_rows:
        _merge[(num_rows,)](
            best, total, token, tokens, probabilities, num_rows, num_splits, _scale(temperature),
            BLOCK=triton.next_power_of_2(num_splits),
        )  # fmt: skip
    return tokens, probabilities


@triton.jit(do_not_specialize=["num_rows"])
def _of_logits(
    logits_ptr, best_ptr, total_ptr, token_ptr, num_rows, num_tokens, share, row, scale, BLOCK: tl.constexpr
):
    """One row's share of the vocabulary: every lane keeps its own maximum, sum and token, joined at the end."""
    i_row = tl.program_id(0).to(tl.int64)
    low = tl.program_id(1) * share
    high = tl.minimum(low + share, num_tokens)
    o = tl.arange(0, BLOCK)
    b_best = tl.full([BLOCK], LOWEST, tl.float32)
    b_total = tl.zeros([BLOCK], tl.float32)
    b_token = low + o
    for i in range(low, high, BLOCK):
        o_token = i + o
        b_logit = tl.load(logits_ptr + i_row * row + o_token, mask=o_token < high, other=float("-inf")).to(tl.float32)
        # Whichever of the two is lower is scaled down to the other.
        b_factor = tl.exp2(-tl.abs(b_logit - b_best) * scale)
        m_above = b_logit > b_best
        b_total = tl.where(m_above, b_total * b_factor + 1.0, b_total + b_factor)
        b_token = tl.where(m_above, o_token, b_token)
        b_best = tl.where(m_above, b_logit, b_best)
    best = tl.max(b_best)
    o_out = tl.program_id(1) * num_rows + i_row
    tl.store(best_ptr + o_out, best)
    tl.store(total_ptr + o_out, tl.sum(b_total * tl.exp2((b_best - best) * scale)))
    tl.store(token_ptr + o_out, tl.min(tl.where(b_best == best, b_token, 2147483647)))


@triton.jit(do_not_specialize=["num_rows"])
def _of_hidden(
    hidden_ptr, head_ptr, best_ptr, total_ptr, token_ptr, num_rows, num_tokens, hidden_row, head_row, scale,
    WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """A tile of rows times a tile of the vocabulary: its logits are reduced where they were made."""
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_r, m_v = o_r < num_rows, o_v < num_tokens
    b_logit = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for i_k in range(0, WIDTH, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = (o_k < WIDTH)[None, :]
        b_hidden = tl.load(
            hidden_ptr + o_r.to(tl.int64)[:, None] * hidden_row + o_k[None, :], mask=m_r[:, None] & m_k, other=0.0
        )
        b_head = tl.load(
            head_ptr + o_v.to(tl.int64)[:, None] * head_row + o_k[None, :], mask=m_v[:, None] & m_k, other=0.0
        )
        if WIDEN:
            b_hidden, b_head = b_hidden.to(tl.float32), b_head.to(tl.float32)
        b_logit = tl.dot(b_hidden, tl.trans(b_head), b_logit, input_precision="ieee")
    b_logit = tl.where(m_v[None, :], b_logit, float("-inf"))
    b_best = tl.max(b_logit, 1)
    b_best = tl.where(b_best > LOWEST, b_best, LOWEST)
    b_total = tl.sum(tl.exp2((b_logit - b_best[:, None]) * scale), 1)
    b_token = tl.min(tl.where(b_logit == b_best[:, None], o_v[None, :], 2147483647), 1)
    b_token = tl.minimum(b_token, tl.program_id(1) * BLOCK_V + BLOCK_V)  # no finite logit: any token
    o_out = tl.program_id(1).to(tl.int64) * num_rows + o_r
    tl.store(best_ptr + o_out, b_best, mask=m_r)
    tl.store(total_ptr + o_out, b_total, mask=m_r)
    tl.store(token_ptr + o_out, b_token, mask=m_r)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge(
    best_ptr, total_ptr, token_ptr, tokens_ptr, probabilities_ptr, num_rows, num_splits, scale, BLOCK: tl.constexpr
):
    i_row = tl.program_id(0)
    o_split = tl.arange(0, BLOCK)
    m = o_split < num_splits
    o = o_split.to(tl.int64) * num_rows + i_row
    b_best = tl.load(best_ptr + o, mask=m, other=LOWEST)
    b_total = tl.load(total_ptr + o, mask=m, other=0.0)
    b_token = tl.load(token_ptr + o, mask=m, other=2147483647)
    best = tl.max(b_best)
    total = tl.sum(b_total * tl.exp2((b_best - best) * scale))
    tl.store(tokens_ptr + i_row, tl.min(tl.where(b_best == best, b_token, 2147483647)).to(tl.int64))
    # No finite logit at all has no probability.
    tl.store(probabilities_ptr + i_row, 1.0 / tl.where(total == 0.0, float("nan"), total))
