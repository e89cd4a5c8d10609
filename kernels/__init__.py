"""Kernels for ragged block-diffusion steps: each a plain specification and a Triton kernel, with one switch.

Tensors on CUDA take Triton, all others the reference. `use` forces a path; `taken` counts calls by path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")
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


def run(specification: Callable[P, R], tensor: torch.Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a specification, or the function of its name in the module `kernel` next to it (imported on first use)."""
    operation, path = specification.__name__, path_for(tensor)
    taken[operation, path] += 1
    if path == "triton":
        kernel = import_module(specification.__module__.removesuffix("reference") + "kernel")
        specification = getattr(kernel, operation)
    return specification(*args, **kwargs)
