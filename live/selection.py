"""Which keys sparse caches keep, in PyTorch: a choice comes with a pass over the whole sequence, which takes longer."""

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d


def kept_by_score(q: Tensor, k: Tensor, start: int, num: int, pool: int, shared: bool) -> Tensor:
    """The kept keys of each KV head by index in the sequence, best first, [num, kv_heads]; ties go low.

    The mean query of a block scores every key outside it. Scores are merged: a group's highest, or, if heads choose
    together (`shared`), their sum in order. They count as the highest of `pool` neighbours. The rule is
    engine/pooled_topk.py.

    q [block, heads, head_dim]: the block's queries, from position `start`; k [length, kv_heads, head_dim].
    """
    block, kv_heads = len(q), k.shape[1]
    candidates = torch.cat([torch.arange(start), torch.arange(start + block, len(k))]).to(k.device)
    query = q.float().mean(0).view(kv_heads, -1, q.shape[2])
    scores = query @ k[candidates].float().permute(1, 2, 0)  # [kv_heads, group, candidates]
    merged = scores.flatten(0, 1).cumsum(0)[-1:] if shared else scores.amax(1)
    pooled = max_pool1d(merged[None], pool, stride=1, padding=pool // 2)[0]
    best = candidates[pooled.sort(dim=1, descending=True, stable=True).indices[:, :num]]
    return best.T.expand(-1, kv_heads)


def votes_of(q: Tensor, k: Tensor, first: int) -> Tensor:
    """MaskKV's votes, [kv_heads, length] in fp32 (full-sequence-diffusion.md 3.2, 3.4).

    A token's votes are its soft-max weights over all keys, summed over the masked queries (from row `first` on) and the
    query heads of a KV head, which share a budget. q, k [length, heads or kv_heads, head_dim].
    """
    kv_heads = k.shape[1]
    masked = q[first:].float().view(len(q) - first, kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)
    votes = []
    for head in range(kv_heads):
        scores = masked[head] @ k[:, head].float().T * q.shape[2] ** -0.5
        votes.append(scores.softmax(-1).sum(0))
    return torch.stack(votes)
