"""Choose the keys and values that a sparse cache keeps, and pack them into dense pages."""

import torch
from torch import Tensor

from .. import run
from ..checks import FLOATS, check_heads, check_starts, check_tensor
from . import reference
from .reference import Choice as Choice


def pooled_topk_pack(
    q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, choice: Choice, *, check: bool = True
) -> Tensor:
    """Which keys of each sequence are kept, by index in it: [choosing heads, S, slots of its pages], -1 unused.

    The block's mean query scores every key outside the block, unscaled. Scores are merged (a group's highest, or the
    sum over all heads if they choose together) and pooled to the highest of `pool` neighbours. The num_kept best go to
    the sequence's pages, i-th best to slot i, ties to the lower index (engine/pooled_topk.py).

    q [N, H, D]: the blocks' queries; k, v [T, Hkv, D]: whole sequences, from a full pass; k_pages, v_pages [num_pages,
    page_size, Hkv, D], written in place. check: refuse values out of range; waits for the device.
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
    if check:
        check_starts("query_start", choice.query_start, len(q), "q")
        check_starts("key_start", choice.key_start, len(k), "k")
        _check_values(choice, k_pages.shape[0], k_pages.shape[1])
    return run(reference.pooled_topk_pack, q, q, k, v, k_pages, v_pages, choice)


def _check_values(choice: Choice, num_pages: int, page_size: int) -> None:
    """Blocks are in their sequences; kept keys fit the candidates and the pages."""
    table, blocks, lengths = choice.page_table, choice.query_start.diff().tolist(), choice.key_start.diff().tolist()
    for s, (start, num) in enumerate(zip(choice.block_start.tolist(), choice.num_kept.tolist(), strict=True)):
        outside = lengths[s] - blocks[s]
        if not 0 <= start <= outside:
            raise ValueError(f"block_start[{s}] is {start}, expected 0 to {outside}")
        most = min(outside, table.shape[1] * page_size) if blocks[s] else 0
        if not 0 <= num <= most:
            raise ValueError(f"num_kept[{s}] is {num}, expected 0 to {most}")
        for i, page in enumerate(table[s, : -(-num // page_size)].tolist()):
            if not 0 <= page < num_pages:
                raise ValueError(f"page_table[{s}, {i}] is {page}, expected 0 to {num_pages - 1}")
