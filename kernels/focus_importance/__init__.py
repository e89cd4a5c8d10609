"""FOCUS's importance of masked tokens: the attention that each draws from all of them (focus.md 3.3)."""

import torch

from .. import take
from ..checks import check_dense, check_device, check_dtype, check_range, check_shape, check_starts
from . import reference


def focus_importance(
    q: torch.Tensor,
    k: torch.Tensor,
    masked: torch.Tensor,
    masked_start: torch.Tensor,
    scale: float | None = None,
    *,
    check: bool = True,
) -> torch.Tensor:
    """The importance of every masked token, [M] fp32.

    Within a sequence, scores of every masked query on every masked key are pooled, along the list of masked tokens, to
    the maximum of a key and its two neighbours; the soft-max over keys of that, summed over queries and heads, is the
    importance. It sums to (query heads) x (masked tokens) in each sequence.

    q [T, H, D] and k [T, Hkv, D] as attention takes them; masked [M] int64, rows of q and k, sequence after sequence;
    masked_start [S+1] int32; scale: D ** -0.5 unless given. check: refuse rows out of range, and wait for the device.
    """
    check_shape("q", q, "T", "H", "D")
    check_shape("k", k, q.shape[0], "Hkv", q.shape[2])
    check_shape("masked", masked, "M")
    check_shape("masked_start", masked_start, "S+1")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, expected a multiple of the {k.shape[1]} of k")
    check_dtype("q", q, torch.float32, torch.bfloat16, torch.float16)
    check_dtype("k", k, q.dtype)
    check_dtype("masked", masked, torch.int64)
    check_dtype("masked_start", masked_start, torch.int32)
    for name, tensor in {"k": k, "masked": masked, "masked_start": masked_start}.items():
        check_device(name, tensor, q.device)
        check_dense(name, tensor)
    check_dense("q", q)
    if check:
        check_starts("masked_start", masked_start, len(masked), "masked")
        check_range("masked", masked, 0, len(q) - 1)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if take("focus_importance", q) == "reference":
        return reference.focus_importance(q, k, masked, masked_start, scale)
    from . import kernel

    return kernel.focus_importance(q, k, masked, masked_start, scale)
