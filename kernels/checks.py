"""The launchers' checks: one line with both values."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype | tuple[torch.dtype, ...], *shape: int | str
) -> None:
    """Check shape, dtype, device, and that the last dimension is contiguous. A letter in `shape` allows any length."""
    found = tensor.shape
    # A loop, since it runs before every launch.
    differs = len(found) != len(shape)
    for have, want in zip(found, shape, strict=False):
        differs |= have != want and not isinstance(want, str)
    if differs:
        raise ValueError(f"{name} has shape {list(found)}, expected [{', '.join(map(str, shape))}]")
    expected = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in expected:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, expected))}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device}")
    if found[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, expected 1")


def check_heads(num_heads: int, num_kv_heads: int, name: str) -> None:
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, expected a multiple of the {num_kv_heads} of {name}")
