"""Attention of ragged queries at arbitrary positions over a paged KV cache."""

import torch
from torch import Tensor

from .. import run
from ..checks import FLOATS, check_heads, check_tensor
from . import reference
from .reference import Sequences as Sequences


def ragged_paged_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, sequences: Sequences[Tensor]) -> Tensor:
    """Each query's output, [N, H, D] of q's dtype: block-causal, over history and listed block positions.

    A query that sees no key reads zeros. Visible keys are finite; other slots may hold anything.

    q [N, H, D]; k_pages, v_pages [num_pages, page_size, Hkv, D].
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
    return run(reference.ragged_paged_attention, q, q, k_pages, v_pages, s, q.shape[2] ** -0.5)
