"""Attention of ragged queries at arbitrary positions over a paged KV cache."""

import torch
from torch import Tensor

from .. import run
from ..checks import FLOATS, check_heads, check_starts, check_tensor
from . import reference
from .reference import Sequences as Sequences


def ragged_paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    sequences: Sequences[Tensor],
    *,
    check: bool = True,
) -> Tensor:
    """Each query's output, [N, H, D] of q's dtype: block-causal, over history and listed block positions.

    A query that sees no key reads zeros. Visible keys are finite; other slots may hold anything.

    q [N, H, D]; k_pages, v_pages [num_pages, page_size, Hkv, D]; check: refuse values out
    of range; waits for the device.
    """
    s, device = sequences, q.device
    check_tensor("q", q, device, FLOATS, "N", "H", "D")
    check_tensor("k_pages", k_pages, device, q.dtype, "num_pages", "page_size", "Hkv", q.shape[2])
    check_tensor("v_pages", v_pages, device, q.dtype, *k_pages.shape)
    check_tensor("page_table", s.page_table, device, torch.int32, "S", "max_pages")
    check_tensor("query_start", s.query_start, device, torch.int32, len(s.page_table) + 1)
    check_tensor("positions", s.positions, device, torch.int32, len(q))
    check_tensor("history", s.history, device, torch.int32, len(s.page_table))
    check_tensor("listed", s.listed, device, torch.bool, len(s.page_table), "W")
    check_heads(q.shape[1], k_pages.shape[2], "k_pages")
    if s.block_length < 1:
        raise ValueError(f"block_length is {s.block_length}, expected at least 1")
    if check:
        _check_values(len(q), k_pages.shape[0], k_pages.shape[1], s)
    return run(reference.ragged_paged_attention, q, q, k_pages, v_pages, s, q.shape[2] ** -0.5)


def _check_values(num_queries: int, num_pages: int, page_size: int, sequences: Sequences[Tensor]) -> None:
    """Rows are in order, and every key that a sequence with queries may see is in a page."""
    page_table, query_start, positions, history, listed = (x.cpu() for x in sequences[:5])
    check_starts("query_start", query_start, num_queries, "q")
    if not num_queries:
        return
    for name, values in (("positions", positions), ("history", history)):
        if int(values.min()) < 0:
            raise ValueError(f"{name} holds {int(values.min())}, expected at least 0")
    num_listed = torch.zeros_like(history)
    if listed.shape[1]:
        num_listed = (listed * torch.arange(1, listed.shape[1] + 1)).amax(1)
    num_keys = (history + num_listed) * (query_start.diff() > 0)
    capacity = page_table.shape[1] * page_size
    if int(num_keys.max()) > capacity:
        s = int(num_keys.argmax())
        raise ValueError(f"sequence {s} has {int(num_keys[s])} keys, expected at most the {capacity} of its pages")
    needed = torch.arange(page_table.shape[1]) * page_size < num_keys[:, None]
    wrong = needed & ((page_table < 0) | (page_table >= num_pages))
    if bool(wrong.any()):
        s, i = wrong.nonzero()[0].tolist()
        raise ValueError(f"page_table[{s}, {i}] is {int(page_table[s, i])}, expected 0 to {num_pages - 1}")
