"""Choose the keys and values that a sparse cache keeps, and pack them into dense pages.

It and the kernel equal the rule of the tests (tests/reference/pooled_topk.py) bit for bit.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ..operation import operation


class Choice(NamedTuple):
    """The keys to choose from and how many to keep, by sequence.

    Sparse-dLLM is shared=True, head-centric is shared=False (full-sequence-diffusion.md 2.2, 4.6).
    """

    query_start: Tensor  # [S + 1] int32
    key_start: Tensor  # [S + 1] int32
    block_start: Tensor  # [S] int32, the block's start in its sequence
    num_kept: Tensor  # [S] int32
    page_table: Tensor  # [S, max_pages] int32
    pool: int = 3  # neighbouring keys
    shared: bool = False  # all heads choose together


def _check(choice: Choice, **_: Tensor) -> None:
    if choice.pool < 1 or choice.pool % 2 == 0:
        raise ValueError(f"pool is {choice.pool}, expected an odd number of at least 1")


@operation(
    "q float N H D",
    "k q T Hkv D",
    "v q T Hkv D",
    "k_pages q num_pages page_size Hkv D",
    "v_pages q num_pages page_size Hkv D",
    "choice.num_kept int32 S",
    "choice.query_start int32 starts",
    "choice.key_start int32 starts",
    "choice.block_start int32 S",
    "choice.page_table int32 S max_pages",
    check=_check,
)
def pooled_topk_pack(q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, choice: Choice) -> Tensor:
    """Which keys of each sequence are kept, by index in it: [choosing heads, S, slots of its pages], -1 unused.

    The block's mean query scores every key outside the block, unscaled. Scores are merged (a group's highest, or the
    sum over all heads if they choose together) and pooled to the highest of `pool` neighbours. The num_kept best go to
    the sequence's pages, i-th best to slot i, ties to the lower index (tests/reference/pooled_topk.py).

    q [N, H, D]: the blocks' queries; k, v [T, Hkv, D]: whole sequences, from a full pass; k_pages, v_pages [num_pages,
    page_size, Hkv, D], written in place.
    """
    query_start, key_start, block_start, num_kept, page_table, pool, shared = choice
    num_kv_heads, page_size = k.shape[1], k_pages.shape[1]
    heads = torch.arange(num_kv_heads, device=k.device)
    num_choosing = 1 if shared else num_kv_heads
    indices = torch.full((num_choosing, len(num_kept), page_table.shape[1] * page_size), -1, dtype=torch.int32)
    indices = indices.to(k.device)
    starts, rows = query_start.tolist(), key_start.tolist()
    for s, (start, num) in enumerate(zip(block_start.tolist(), num_kept.tolist(), strict=True)):
        block = starts[s + 1] - starts[s]
        length = rows[s + 1] - rows[s]
        own_k, own_v = k[rows[s] : rows[s + 1]], v[rows[s] : rows[s + 1]]
        candidates = torch.cat([torch.arange(start), torch.arange(start + block, length)]).to(k.device)
        if num == 0:
            continue
        query = q[starts[s] : starts[s + 1]].float().mean(0).view(num_kv_heads, -1, q.shape[2])  # [Hkv, G, D]
        scores = query @ own_k[candidates].float().permute(1, 2, 0)  # [Hkv, G, candidates]
        if shared:
            merged = torch.zeros_like(scores[0, :1])
            for head in scores.flatten(0, 1):
                merged = merged + head
        else:
            merged = scores.amax(1)
        pooled = F.max_pool1d(merged[None], pool, stride=1, padding=pool // 2)[0]
        best = candidates[pooled.sort(dim=1, descending=True, stable=True).indices[:, :num]]
        indices[:, s, :num] = best
        spots = torch.arange(num, device=k.device)
        pages, slots = page_table[s, spots // page_size].long(), spots % page_size
        for to_pages, source in ((k_pages, own_k), (v_pages, own_v)):
            to_pages[pages, slots] = source[best.T, heads]  # [num, Hkv, D]
    return indices
