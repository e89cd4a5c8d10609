"""Attention of ragged queries at arbitrary positions over a paged KV cache."""

import torch

from .. import take, taken
from ..checks import check_dense, check_device, check_dtype, check_shape, check_starts
from . import reference
from .flashinfer import Planned


def ragged_paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    listed: torch.Tensor,
    block_length: int,
    scale: float | None = None,
    *,
    check: bool = True,
    planned: Planned | None = None,
) -> torch.Tensor:
    """The values that every query reads, [N, H, D] of q's dtype: block-causal, over history and listed block positions.

    Key j of sequence s lies in page page_table[s, j // page_size] at slot j % page_size. A query at position p sees it
    iff j // block_length <= p // block_length and (j < history[s] or listed[s, j - history[s]]). A query that sees no
    key reads zeros. Keys of the history and listed ones are finite; what other slots hold does not matter.

    q [N, H, D]; k_pages, v_pages [num_pages, page_size, Hkv, D]; page_table [S, max_pages] int32, unused entries -1;
    query_start [S+1] int32, sequence s has rows query_start[s] to query_start[s+1]; positions [N] int32, absolute;
    history [S] int32; listed [S, W] bool. scale: D ** -0.5 unless given. check: refuse values (not only shapes) out of
    range, which waits for the device; a caller that made them on the host may have checked there.
    planned: what attends in the kernel's stead, having been told of these sequences (flashinfer.py).
    """
    num_queries, num_heads, head_dim = q.shape if q.dim() == 3 else (-1, -1, -1)
    num_sequences = page_table.shape[0] if page_table.dim() == 2 else -1
    check_shape("q", q, "N", "H", "D")
    check_shape("k_pages", k_pages, "num_pages", "page_size", "Hkv", head_dim)
    check_shape("v_pages", v_pages, *k_pages.shape)
    check_shape("page_table", page_table, "S", "max_pages")
    check_shape("query_start", query_start, num_sequences + 1)
    check_shape("positions", positions, num_queries)
    check_shape("history", history, num_sequences)
    check_shape("listed", listed, num_sequences, "W")
    if k_pages.shape[2] == 0 or num_heads % k_pages.shape[2]:
        raise ValueError(f"q has {num_heads} heads, expected a multiple of the {k_pages.shape[2]} of k_pages")
    check_dtype("q", q, torch.float32, torch.bfloat16, torch.float16)
    check_dtype("k_pages", k_pages, q.dtype)
    check_dtype("v_pages", v_pages, q.dtype)
    check_dtype("listed", listed, torch.bool)
    integers = {"page_table": page_table, "query_start": query_start, "positions": positions, "history": history}
    for name, tensor in integers.items():
        check_dtype(name, tensor, torch.int32)
    for name, tensor in {"k_pages": k_pages, "v_pages": v_pages, "listed": listed, **integers}.items():
        check_device(name, tensor, q.device)
    for name, tensor in {"q": q, "k_pages": k_pages, "v_pages": v_pages, "listed": listed, **integers}.items():
        check_dense(name, tensor)
    if block_length < 1:
        raise ValueError(f"block_length is {block_length}, expected at least 1")
    if check:
        _check_values(num_queries, k_pages, page_table, query_start, positions, history, listed)
    if planned is not None:
        taken["ragged_paged_attention", "flashinfer"] += 1
        return planned(q, k_pages, v_pages)
    arguments = (q, k_pages, v_pages, page_table, query_start, positions, history, listed, block_length)
    scale = head_dim**-0.5 if scale is None else scale
    if take("ragged_paged_attention", q) == "reference":
        return reference.ragged_paged_attention(*arguments, scale)
    from . import kernel

    return kernel.ragged_paged_attention(*arguments, scale)


def _check_values(
    num_queries: int,
    k_pages: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    listed: torch.Tensor,
) -> None:
    """Rows in order, and every key that a sequence with queries may see in a page there is."""
    num_pages, page_size = k_pages.shape[:2]
    page_table, query_start, history, listed = (t.cpu() for t in (page_table, query_start, history, listed))
    check_starts("query_start", query_start, num_queries, "q")
    if num_queries and int(positions.min()) < 0:
        raise ValueError(f"positions holds {int(positions.min())}, expected at least 0")
    if not num_queries:
        return
    if int(history.min()) < 0:
        raise ValueError(f"history holds {int(history.min())}, expected at least 0")
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
