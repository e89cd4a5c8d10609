"""Attention of each sequence's last rows over its paged keys, in a window: causal, or in both directions."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ..operation import operation

TILE = 256  # queries at a time: bounds memory


class Spans(NamedTuple):
    """Where each sequence's rows and keys are. Key j is in page page_table[s, j // page_size] at j % page_size."""

    page_table: Tensor  # [S, max_pages] int32; -1 where no query sees
    query_start: Tensor  # [S + 1] int32; the rows of sequence s are query_start[s] to query_start[s + 1]
    lengths: Tensor  # [S] int32: keys; the rows' are the last


def _check(window: int, **_: object) -> None:
    if window < 0:
        raise ValueError(f"window is {window}, expected at least 0")


@operation(
    "q float N H D", "k_pages q num_pages page_size Hkv D", "v_pages q num_pages page_size Hkv D",
    "spans.page_table int32 S max_pages", "spans.query_start int32 S+1", "spans.lengths int32 S", check=_check,
)  # fmt: skip
def window_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, spans: Spans, window: int, causal: bool, scale: float
) -> Tensor:
    """Each query's output, [N, H, D] of q's dtype.

    A sequence's rows are its last positions. Causal: a query sees its position and the window - 1 before it. Otherwise
    it sees all rows of its sequence and the window - 1 positions before the first. A query that sees no key reads
    zeros. Visible keys are finite; other slots may hold anything.

    q [N, H, D]; k_pages, v_pages [num_pages, page_size, Hkv, D]; window: 0 for none.
    """
    _, page_size, num_kv_heads, head_dim = k_pages.shape
    group = q.shape[1] // num_kv_heads
    out = torch.zeros_like(q)
    lengths = spans.lengths.tolist()
    for s, (first, last) in enumerate(itertools.pairwise(spans.query_start.tolist())):
        begin = lengths[s] - (last - first)  # the first row's position
        low = max(0, begin - window + 1) if window else 0
        if first == last or lengths[s] <= low:
            continue
        position = torch.arange(low, lengths[s], device=q.device)
        pages = spans.page_table[s].long()[position // page_size]
        k, v = (x[pages, position % page_size].float().transpose(0, 1) for x in (k_pages, v_pages))  # [Hkv, keys, D]
        for tile in range(first, last, TILE):
            end = min(tile + TILE, last)
            query = torch.arange(begin + tile - first, begin + end - first, device=q.device)[:, None]
            hidden = torch.zeros(end - tile, len(position), dtype=torch.bool, device=q.device)
            if causal:
                hidden = (position > query) | ((position <= query - window) if window else False)
            b_q = q[tile:end].float().reshape(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
            scores = (b_q @ k.transpose(1, 2) * scale).view(num_kv_heads, group, end - tile, -1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            if begin < 0:
                weights = weights.nan_to_num(0.0)  # rows before position 0 see nothing
            b_out = (weights.flatten(1, 2) @ v).view(num_kv_heads, group, end - tile, head_dim)
            out[tile:end] = b_out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out
