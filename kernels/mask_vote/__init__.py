"""MaskKV's votes: the attention that each token gets from masked ones (full-sequence-diffusion.md 3.2, 3.4)."""

import torch
from torch import Tensor

from .. import run
from ..checks import FLOATS, check_heads, check_tensor
from . import reference


def mask_vote(
    q: Tensor, k: Tensor, masked: Tensor, masked_start: Tensor, key_start: Tensor, num_prompt: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Votes [Hkv, T] fp32, and their sums over the prompt and over masked tokens, each [S, Hkv] fp32.

    A token's votes are its soft-max weights over all keys of the sequence, summed over masked queries and over the
    query heads of a KV head, which share a budget. A head prefers the prompt by to_prompt / (to_prompt + to_masked).

    q [T, H, D], k [T, Hkv, D]: whole sequences, from a full pass; masked [M] int64: rows of masked tokens, sequence
    after sequence; masked_start, key_start [S+1] int32; num_prompt [S] int32: prompt lengths.
    """
    num_sequences = num_prompt.shape[0]
    check_tensor("q", q, q.device, FLOATS, "T", "H", "D")
    check_tensor("k", k, q.device, q.dtype, q.shape[0], "Hkv", q.shape[2])
    check_heads(q.shape[1], k.shape[1], "k")
    check_tensor("masked", masked, q.device, torch.int64, "M")
    check_tensor("masked_start", masked_start, q.device, torch.int32, num_sequences + 1)
    check_tensor("key_start", key_start, q.device, torch.int32, num_sequences + 1)
    check_tensor("num_prompt", num_prompt, q.device, torch.int32, "S")
    return run(reference.mask_vote, q, q, k, masked, masked_start, key_start, num_prompt, q.shape[2] ** -0.5)
