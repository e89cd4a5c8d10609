"""MaskKV's votes in plain PyTorch and fp32: the specification."""

import torch
from torch import Tensor


def mask_vote(
    q: Tensor, k: Tensor, masked: Tensor, masked_start: Tensor, key_start: Tensor, num_prompt: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    num_keys, num_kv_heads, head_dim = k.shape
    votes = torch.zeros((num_kv_heads, num_keys), dtype=torch.float32, device=k.device)
    to_prompt, to_masked = (torch.zeros((len(num_prompt), num_kv_heads), device=k.device) for _ in range(2))
    starts, rows = masked_start.tolist(), key_start.tolist()
    for s, prompt in enumerate(num_prompt.tolist()):
        own = slice(rows[s], rows[s + 1])
        queries = masked[starts[s] : starts[s + 1]]
        if len(queries) == 0:
            continue
        b_q = q[queries].float().reshape(len(queries), num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [Hkv, G, M, D]
        weights = (b_q @ k[own].float().permute(1, 2, 0)[:, None] * scale).softmax(-1)  # [Hkv, G, M, keys]
        votes[:, own] = weights.sum((1, 2))
        to_prompt[s] = votes[:, rows[s] : rows[s] + prompt].sum(1)
        to_masked[s] = votes[:, queries].sum(1)
    return votes, to_prompt, to_masked
