"""The launchers' checks, each in one line that names the value found and the value expected."""

import torch


def check_shape(name: str, tensor: torch.Tensor, *expected: int | str) -> None:
    """A dimension given by a letter may have any length."""
    shape = tensor.shape
    if len(shape) == len(expected):
        for have, want in zip(shape, expected, strict=True):  # a loop: it runs before every launch
            if have != want and not isinstance(want, str):
                break
        else:
            return
    raise ValueError(f"{name} has shape [{_join(tuple(shape))}], expected [{_join(expected)}]")


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


def check_starts(name: str, starts: torch.Tensor, num_rows: int, of: str) -> None:
    """Where each sequence's rows begin, and where the last one's end; looks at values."""
    values = starts.tolist()
    if values[0] != 0 or values[-1] != num_rows or values != sorted(values):
        raise ValueError(f"{name} is {values}, expected to rise from 0 to the {num_rows} rows of {of}")


def check_range(name: str, tensor: torch.Tensor, low: int, high: int) -> None:
    """Every value from low to high, both included; looks at values."""
    if tensor.numel() and (int(tensor.min()) < low or int(tensor.max()) > high):
        wrong = tensor[(tensor < low) | (tensor > high)][0]
        raise ValueError(f"{name} holds {int(wrong)}, expected {low} to {high}")


def _join(sizes: tuple[int | str, ...]) -> str:
    return ", ".join(map(str, sizes))
