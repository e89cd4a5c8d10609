"""Choose the keys and values that a sparse cache keeps, and pack them into dense pages."""

import torch
from torch import Tensor

from .. import run
from ..checks import FLOATS, check_heads, check_tensor
from . import reference
from .reference import Choice as Choice


def pooled_topk_pack(q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, choice: Choice) -> Tensor:
    """Which keys of each sequence are kept, by index in it: [choosing heads, S, slots of its pages], -1 unused.

    The block's mean query scores every key outside the block, unscaled. Scores are merged (a group's highest, or the
    sum over all heads if they choose together) and pooled to the highest of `pool` neighbours. The num_kept best go to
    the sequence's pages, i-th best to slot i, ties to the lower index (engine/pooled_topk.py).

    q [N, H, D]: the blocks' queries; k, v [T, Hkv, D]: whole sequences, from a full pass; k_pages, v_pages [num_pages,
    page_size, Hkv, D], written in place.
    """
    num_sequences = choice.num_kept.shape[0]
    check_tensor("q", q, q.device, FLOATS, "N", "H", "D")
    check_tensor("k", k, q.device, q.dtype, "T", "Hkv", q.shape[2])
    check_tensor("v", v, q.device, q.dtype, *k.shape)
    check_heads(q.shape[1], k.shape[1], "k")
    check_tensor("k_pages", k_pages, q.device, q.dtype, "num_pages", "page_size", *k.shape[1:])
    check_tensor("v_pages", v_pages, q.device, q.dtype, *k_pages.shape)
    check_tensor("num_kept", choice.num_kept, q.device, torch.int32, "S")
    check_tensor("query_start", choice.query_start, q.device, torch.int32, num_sequences + 1)
    check_tensor("key_start", choice.key_start, q.device, torch.int32, num_sequences + 1)
    check_tensor("block_start", choice.block_start, q.device, torch.int32, num_sequences)
    check_tensor("page_table", choice.page_table, q.device, torch.int32, num_sequences, "max_pages")
    if choice.pool < 1 or choice.pool % 2 == 0:
        raise ValueError(f"pool is {choice.pool}, expected an odd number of at least 1")
    return run(reference.pooled_topk_pack, q, q, k, v, k_pages, v_pages, choice)
