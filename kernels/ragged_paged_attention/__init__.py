"""Attention of ragged queries at arbitrary positions over a paged KV cache."""

import itertools
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..operation import operation

TILE = 256  # queries at a time: bounds memory, and lets early blocks skip keys of later ones
WHOLE = 1 << 30  # a block_length that hides no key
Array = TypeVar("Array")  # on the device or the host


class Sequences(NamedTuple, Generic[Array]):
    """Where each sequence's queries and keys are, and the keys that a query sees.

    Key j of sequence s is in page page_table[s, j // page_size], slot j % page_size. A query at position p sees it iff
    j // block_length <= p // block_length and (j < history[s] or listed[s, j - history[s]]).
    """

    page_table: Array  # [S, max_pages] int32, unused entries -1
    query_start: Array  # [S + 1] int32; the rows of sequence s are query_start[s] to query_start[s + 1]
    positions: Array  # [N] int32, absolute
    history: Array  # [S] int32
    listed: Array  # [S, W] bool
    block_length: int
    spare: int = 0  # last sequences, without keys: the launch is chosen for the others


def _check(k_pages: Tensor, v_pages: Tensor, sequences: Sequences[Tensor], window: int = 0, **_: object) -> None:
    if v_pages.stride() != k_pages.stride():
        raise ValueError(f"v_pages has strides {v_pages.stride()}, expected those of k_pages, {k_pages.stride()}")
    if sequences.block_length < 1:
        raise ValueError(f"block_length is {sequences.block_length}, expected at least 1")
    if window < 0:
        raise ValueError(f"window is {window}, expected at least 0")


@operation(
    "q float N H D",
    "k_pages q num_pages page_size Hkv D",
    "v_pages q num_pages page_size Hkv D",
    "sequences.page_table int32 S max_pages",
    "sequences.query_start int32 starts",
    "sequences.positions int32 N",
    "sequences.history int32 S",
    "sequences.listed bool S W",
    check=_check,
)
def ragged_paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    sequences: Sequences[Tensor],
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Each query's output, [N, H, D] of q's dtype: block-causal, over history and listed block positions.

    A query that sees no key reads zeros. Visible keys are finite; other slots may hold anything.

    q [N, H, D]; k_pages, v_pages [num_pages, page_size, Hkv, D]. window: a query at position p does not see keys up to
    min(p, history[s]) - window; 0 for none. scale: of scores, by default D^-0.5.
    """
    page_table, query_start, positions, history, listed, block_length, _ = sequences
    _, page_size, num_kv_heads, head_dim = k_pages.shape
    group = q.shape[1] // num_kv_heads
    out = torch.zeros_like(q)
    # Keys that a sequence may see: history, and its block up to the last listed position.
    num_listed = torch.zeros_like(history)
    if listed.shape[1]:
        num_listed = (listed * torch.arange(1, listed.shape[1] + 1, device=q.device)).amax(1)
    starts, lengths, total = query_start.tolist(), history.tolist(), (history + num_listed).tolist()
    for s, (first, end) in enumerate(itertools.pairwise(starts)):
        if first == end or total[s] == 0:
            continue
        key = torch.arange(total[s], device=q.device)
        pages = page_table[s, : -(-total[s] // page_size)]
        k = k_pages[pages].flatten(0, 1)[: total[s]].float().permute(1, 2, 0)  # [Hkv, D, keys]
        v = v_pages[pages].flatten(0, 1)[: total[s]].float().transpose(0, 1)  # [Hkv, keys, D]
        offered = torch.ones(total[s], dtype=torch.bool, device=q.device)
        offered[lengths[s] :] = listed[s, : total[s] - lengths[s]]
        for low in range(first, end, TILE):
            rows = slice(low, min(low + TILE, end))
            position = positions[rows, None]
            num_keys = min(total[s], (int(position.max()) // block_length + 1) * block_length)
            visible = offered & (key // block_length <= position // block_length)
            if window:
                visible &= key > position.clamp(max=lengths[s]) - window
            visible = visible[:, :num_keys]  # [queries, keys]
            b_q = q[rows].float().reshape(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
            scores = (b_q.flatten(1, 2) @ k[:, :, :num_keys]).mul_(scale or head_dim**-0.5)
            weights = scores.view(*b_q.shape[:3], -1).masked_fill_(~visible, -torch.inf).softmax(-1)
            weights = weights.masked_fill(~visible, 0.0)  # a query that sees no key
            b_v = v[:, :num_keys].masked_fill(~visible.any(0)[:, None], 0.0)  # an unwritten slot may hold NaN
            b_out = (weights.flatten(1, 2) @ b_v).view(b_q.shape)
            out[rows] = b_out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out
