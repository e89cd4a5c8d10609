"""What the launchers check, each in one line that names the value found and the value expected."""

import torch


def check_shape(name: str, tensor: torch.Tensor, *expected: int | str) -> None:
    """A dimension given by a letter may have any length."""
    shape = tuple(tensor.shape)
    fits = len(shape) == len(expected) and all(
        isinstance(e, str) or e == n for n, e in zip(shape, expected, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape [{_join(shape)}], expected [{_join(expected)}]")


def check_dtype(name: str, tensor: torch.Tensor, *expected: torch.dtype) -> None:
    if tensor.dtype not in expected:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, expected))}")


def check_device(name: str, tensor: torch.Tensor, expected: torch.device) -> None:
    if tensor.device != expected:
        raise ValueError(f"{name} is on {tensor.device}, expected {expected}")


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """The last dimension lies together in memory; the others may have any stride."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, expected 1")


def _join(sizes: tuple[int | str, ...]) -> str:
    return ", ".join(map(str, sizes))
