"""Kernels for ragged block-diffusion steps: a plain specification and a Triton kernel each, and one switch.

Where tensors lie decides: Triton on CUDA, the reference elsewhere. `use` forces a path; `taken` says which were taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Path = Literal["reference", "triton"]
Taken = Literal["reference", "triton", "flashinfer"]

taken: Counter[tuple[str, Taken]] = Counter()  # calls by operation and path, since the process began
_choice: ContextVar[Literal["auto"] | Path] = ContextVar("path", default="auto")


@contextmanager
def use(path: Literal["auto"] | Path) -> Iterator[None]:
    """Take this path for every kernel called inside the `with`, wherever its tensors lie."""
    if path not in ("auto", "reference", "triton"):
        raise ValueError(f"path is {path!r}, expected auto, reference or triton")
    token = _choice.set(path)
    try:
        yield
    finally:
        _choice.reset(token)


def path_for(tensor: torch.Tensor) -> Path:
    """The path that a kernel takes for such a tensor here and now."""
    choice = _choice.get()
    if choice == "auto":
        return "triton" if tensor.is_cuda else "reference"
    return choice


def take(operation: str, tensor: torch.Tensor) -> Path:
    """`path_for` as the launchers ask it: the answer is counted in `taken`."""
    path = path_for(tensor)
    taken[operation, path] += 1
    return path
