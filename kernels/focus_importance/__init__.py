"""FOCUS's importance of masked tokens: the attention that each gets from all of them (focus.md 3.3)."""

import torch
from torch import Tensor

from .. import run
from ..checks import FLOATS, check_heads, check_tensor
from . import reference


def focus_importance(q: Tensor, k: Tensor, masked: Tensor, masked_start: Tensor) -> Tensor:
    """The importance of every masked token, [M] fp32; it sums to (query heads) x (masked tokens) in each sequence.

    Scores of masked queries on masked keys are pooled, along the sequence's list of masked tokens, to the maximum of a
    key and its two neighbours. Importance is their soft-max over keys, summed over queries and heads.

    q [T, H, D] and k [T, Hkv, D] as for attention; masked [M] int64, rows of q and k, sequence after sequence;
    masked_start [S+1] int32.
    """
    check_tensor("q", q, q.device, FLOATS, "T", "H", "D")
    check_tensor("k", k, q.device, q.dtype, q.shape[0], "Hkv", q.shape[2])
    check_heads(q.shape[1], k.shape[1], "k")
    check_tensor("masked", masked, q.device, torch.int64, "M")
    check_tensor("masked_start", masked_start, q.device, torch.int32, "S+1")
    return run(reference.focus_importance, q, q, k, masked, masked_start, q.shape[2] ** -0.5)
