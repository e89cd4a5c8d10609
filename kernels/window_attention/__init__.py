"""Attention of each sequence's last rows over its paged keys, in a window: causal, or in both directions."""

import torch
from torch import Tensor

from .. import run
from ..checks import FLOATS, check_heads, check_tensor
from . import reference
from .reference import Spans as Spans


def window_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, spans: Spans, window: int, causal: bool, scale: float
) -> Tensor:
    """Each query's output, [N, H, D] of q's dtype.

    A sequence's rows are its last positions. Causal: a query sees its position and the window - 1 before it. Otherwise
    it sees all rows of its sequence and the window - 1 positions before the first. A query that sees no key reads
    zeros. Visible keys are finite; other slots may hold anything.

    q [N, H, D]; k_pages, v_pages [num_pages, page_size, Hkv, D]; window: 0 for none.
    """
    device, num = q.device, len(spans.page_table)
    check_tensor("q", q, device, FLOATS, "N", "H", "D")
    check_tensor("k_pages", k_pages, device, q.dtype, "num_pages", "page_size", "Hkv", q.shape[2])
    check_tensor("v_pages", v_pages, device, q.dtype, *k_pages.shape)
    check_tensor("page_table", spans.page_table, device, torch.int32, num, "max_pages")
    check_tensor("query_start", spans.query_start, device, torch.int32, num + 1)
    check_tensor("lengths", spans.lengths, device, torch.int32, num)
    check_heads(q.shape[1], k_pages.shape[2], "k_pages")
    if window < 0:
        raise ValueError(f"window is {window}, expected at least 0")
    return run(reference.window_attention, q, q, k_pages, v_pages, spans, window, causal, scale)
