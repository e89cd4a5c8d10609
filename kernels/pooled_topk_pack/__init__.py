"""Choosing the keys and values that a sparse cache keeps, and packing them into dense pages."""

import torch

from .. import take
from ..checks import check_dense, check_device, check_dtype, check_shape, check_starts
from . import reference


def pooled_topk_pack(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    block_start: torch.Tensor,
    num_kept: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    pool: int = 3,
    shared: bool = False,
    *,
    check: bool = True,
) -> torch.Tensor:
    """Which keys of each sequence are kept, by index in it: [heads that choose, S, slots of its pages], -1 unused.

    The mean query of a block scores every key outside the block, unscaled; scores are put together (a group's highest,
    or over all heads when they choose together), pooled to the highest of `pool` neighbours, and the num_kept best are
    written to the sequence's pages, i-th best to slot i, lower index first on ties (engine/pooled_topk.py). Sparse-dLLM
    is shared=True, head-centric is shared=False (full-sequence-diffusion.md 2.2, 4.6).

    q [N, H, D]: the blocks' queries; k, v [T, Hkv, D]: whole sequences, from a full pass; query_start, key_start [S+1]
    int32; block_start [S] int32: where the block begins in its sequence; num_kept [S] int32; k_pages, v_pages
    [num_pages, page_size, Hkv, D], written in place; page_table [S, max_pages] int32. check: refuse values out of
    range, which waits for the device.
    """
    num_sequences = num_kept.shape[0]
    check_shape("q", q, "N", "H", "D")
    check_shape("k", k, "T", "Hkv", q.shape[2])
    check_shape("v", v, *k.shape)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, expected a multiple of the {k.shape[1]} of k")
    check_shape("k_pages", k_pages, "num_pages", "page_size", *k.shape[1:])
    check_shape("v_pages", v_pages, *k_pages.shape)
    check_shape("num_kept", num_kept, "S")
    check_shape("query_start", query_start, num_sequences + 1)
    check_shape("key_start", key_start, num_sequences + 1)
    check_shape("block_start", block_start, num_sequences)
    check_shape("page_table", page_table, num_sequences, "max_pages")
    check_dtype("q", q, torch.float32, torch.bfloat16, torch.float16)
    floats = {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages}
    integers = {
        "query_start": query_start, "key_start": key_start, "block_start": block_start, "num_kept": num_kept,
        "page_table": page_table,
    }  # fmt: skip
    for tensors, dtype in ((floats, q.dtype), (integers, torch.int32)):
        for name, tensor in tensors.items():
            check_dtype(name, tensor, dtype)
            check_device(name, tensor, q.device)
            check_dense(name, tensor)
    check_dense("q", q)
    if pool < 1 or pool % 2 == 0:
        raise ValueError(f"pool is {pool}, expected an odd number of at least 1")
    if check:
        check_starts("query_start", query_start, len(q), "q")
        check_starts("key_start", key_start, len(k), "k")
        _check_values(k_pages, *(t.cpu() for t in integers.values()))
    arguments = (q, k, v, query_start, key_start, block_start, num_kept, k_pages, v_pages, page_table, pool, shared)
    if take("pooled_topk_pack", q) == "reference":
        return reference.pooled_topk_pack(*arguments)
    from . import kernel

    return kernel.pooled_topk_pack(*arguments)


def _check_values(
    k_pages: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    block_start: torch.Tensor,
    num_kept: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Every block lies in its sequence, and what is kept in the candidates and in the pages there are."""
    num_pages, page_size = k_pages.shape[:2]
    blocks, lengths = query_start.diff(), key_start.diff()
    for s, (start, block, length) in enumerate(
        zip(block_start.tolist(), blocks.tolist(), lengths.tolist(), strict=True)
    ):
        if not 0 <= start <= length - block:
            raise ValueError(f"block_start[{s}] is {start}, expected 0 to {length - block}")
        num = int(num_kept[s])
        most = min(length - block, page_table.shape[1] * page_size) if block else 0
        if not 0 <= num <= most:
            raise ValueError(f"num_kept[{s}] is {num}, expected 0 to {most}")
        for i, page in enumerate(page_table[s, : -(-num // page_size)].tolist()):
            if not 0 <= page < num_pages:
                raise ValueError(f"page_table[{s}, {i}] is {page}, expected 0 to {num_pages - 1}")
