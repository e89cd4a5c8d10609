"""Kernels for ragged block-diffusion steps: each a plain specification and a Triton kernel, with one switch.

Tensors on CUDA take Triton, all others the reference. `use` forces a path; `taken` counts calls by path.
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

taken: Counter[tuple[str, Path]] = Counter()  # calls by operation and path in this process
_choice: ContextVar[Literal["auto"] | Path] = ContextVar("path", default="auto")


@contextmanager
def use(path: Literal["auto"] | Path) -> Iterator[None]:
    """Take this path for every kernel inside the `with`, on any device."""
    if path not in ("auto", "reference", "triton"):
        raise ValueError(f"path is {path!r}, expected auto, reference or triton")
    token = _choice.set(path)
    try:
        yield
    finally:
        _choice.reset(token)


def path_for(tensor: torch.Tensor) -> Path:
    """The path of a kernel for this tensor here and now."""
    choice = _choice.get()
    if choice == "auto":
        return "triton" if tensor.is_cuda else "reference"
    return choice
