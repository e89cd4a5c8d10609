"""The best of a sequence's keys and values, packed into dense pages, in plain PyTorch and fp32: the specification.

The rule itself is the engine's (engine/pooled_topk.py); this and the kernel are held to it bit for bit.
"""

import torch
import torch.nn.functional as F  # noqa: N812


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
    pool: int,
    shared: bool,
) -> torch.Tensor:
    """See the launcher."""
    num_kv_heads, page_size = k.shape[1], k_pages.shape[1]
    heads = torch.arange(num_kv_heads, device=k.device)
    num_choosing = 1 if shared else num_kv_heads
    kept = torch.full((num_choosing, len(num_kept), page_table.shape[1] * page_size), -1, dtype=torch.int32)
    kept = kept.to(k.device)
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
        kept[:, s, :num] = best
        spots = torch.arange(num, device=k.device)
        pages, slots = page_table[s, spots // page_size].long(), spots % page_size
        for to_pages, own in ((k_pages, own_k), (v_pages, own_v)):
            to_pages[pages, slots] = own[best.T, heads]  # [num, Hkv, D]
    return kept
