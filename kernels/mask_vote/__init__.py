"""MaskKV's votes: how much attention each token draws from the masked ones (full-sequence-diffusion.md 3.2, 3.4)."""

import torch

from .. import take
from ..checks import check_dense, check_device, check_dtype, check_range, check_shape, check_starts
from . import reference


def mask_vote(
    q: torch.Tensor,
    k: torch.Tensor,
    masked: torch.Tensor,
    masked_start: torch.Tensor,
    key_start: torch.Tensor,
    num_prompt: torch.Tensor,
    scale: float | None = None,
    *,
    check: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Votes [Hkv, T] fp32, and what of them goes to the prompt and to masked tokens, each [S, Hkv] fp32.

    A token's votes in a sequence are what the soft-max over all keys of the sequence gives it, summed over masked
    queries, and over the query heads of a KV head since they share its budget. A head's preference for the prompt is
    to_prompt / (to_prompt + to_masked).

    q [T, H, D], k [T, Hkv, D]: whole sequences, from a full pass; masked [M] int64: rows of the masked tokens, sequence
    after sequence; masked_start, key_start [S+1] int32; num_prompt [S] int32: the first tokens of each sequence are its
    prompt; scale: D ** -0.5 unless given. check: refuse values out of range, which waits for the device.
    """
    num_sequences = num_prompt.shape[0]
    check_shape("q", q, "T", "H", "D")
    check_shape("k", k, q.shape[0], "Hkv", q.shape[2])
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, expected a multiple of the {k.shape[1]} of k")
    check_shape("masked", masked, "M")
    check_shape("masked_start", masked_start, num_sequences + 1)
    check_shape("key_start", key_start, num_sequences + 1)
    check_shape("num_prompt", num_prompt, "S")
    check_dtype("q", q, torch.float32, torch.bfloat16, torch.float16)
    check_dtype("k", k, q.dtype)
    check_dtype("masked", masked, torch.int64)
    integers = {"masked_start": masked_start, "key_start": key_start, "num_prompt": num_prompt}
    for name, tensor in integers.items():
        check_dtype(name, tensor, torch.int32)
    for name, tensor in {"q": q, "k": k, "masked": masked, **integers}.items():
        check_device(name, tensor, q.device)
        check_dense(name, tensor)
    if check:
        check_starts("masked_start", masked_start, len(masked), "masked")
        check_starts("key_start", key_start, len(k), "k")
        _check_values(*(t.cpu() for t in (masked, masked_start, key_start, num_prompt)))
    arguments = (q, k, masked, masked_start, key_start, num_prompt, q.shape[2] ** -0.5 if scale is None else scale)
    if take("mask_vote", q) == "reference":
        return reference.mask_vote(*arguments)
    from . import kernel

    return kernel.mask_vote(*arguments)


def _check_values(
    masked: torch.Tensor, masked_start: torch.Tensor, key_start: torch.Tensor, num_prompt: torch.Tensor
) -> None:
    """Masked tokens and prompts lie in their sequences."""
    for s, prompt in enumerate(num_prompt.tolist()):
        first, last = key_start[s : s + 2].tolist()
        check_range("masked", masked[masked_start[s] : masked_start[s + 1]], first, last - 1)
        if not 0 <= prompt <= last - first:
            raise ValueError(f"num_prompt[{s}] is {prompt}, expected 0 to {last - first}")
