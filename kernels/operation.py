"""An operation: a specification in plain PyTorch and a Triton kernel of the same arguments, behind one check."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch

from . import Path, path_for, taken

P = ParamSpec("P")
R = TypeVar("R")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def operation(*tensors: str, check: Callable[..., None] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a specification, then call it, or the kernel of its name where `path_for` says so.

    tensors: `name dtype dimensions`; the first one's device is that of all. name: an argument, or record.field. dtype:
    `float`, an earlier tensor's name, or PyTorch's. Equal dimensions have the same name. None is not checked. check: of
    other arguments, which are passed by name.
    """
    rules = [(*name.partition(".")[::2], dtype, sizes) for name, dtype, *sizes in map(str.split, tensors)]

    def decorate(specification: Callable[P, R]) -> Callable[P, R]:
        parameters = signature(specification).parameters
        defaults = {name: entry.default for name, entry in parameters.items() if entry.default is not entry.empty}

        @wraps(specification)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            arguments = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
            _check(rules, arguments)
            if check is not None:
                check(**arguments)
            return run(specification, arguments, path_for(arguments[rules[0][0]]))

        return call

    return decorate


def run(specification: Callable[..., R], arguments: dict[str, Any], path: Path) -> R:
    name = specification.__name__
    taken[name, path] += 1
    if path == "triton":
        specification = getattr(
            import_module(f"{specification.__module__}.{specification.__module__.rpartition('.')[2]}_kernel"), name
        )
    return specification(**arguments)


def _check(rules: list[tuple[str, str, str, list[str]]], arguments: dict[str, Any]) -> None:
    """ValueError says a tensor's shape, dtype, device or stride, and what is expected."""
    lengths: dict[str, int] = {}
    dtypes: dict[str, torch.dtype] = {}
    device = arguments[rules[0][0]].device
    for name, field, dtype, sizes in rules:
        tensor, label = arguments[name], field or name
        if field:
            tensor = getattr(tensor, field)
        if tensor is None:
            continue
        shape = dict(zip(sizes, tensor.shape, strict=False))
        if tensor.ndim != len(sizes) or any(lengths.get(size, length) != length for size, length in shape.items()):
            expected = ", ".join(str(lengths.get(size, size)) for size in sizes)
            raise ValueError(f"{label} has shape {list(tensor.shape)}, expected [{expected}]")
        lengths |= shape
        allowed: tuple[torch.dtype, ...] = FLOATS
        if dtype != "float":
            allowed = (dtypes.get(dtype) or getattr(torch, dtype),)
        if tensor.dtype not in allowed:
            raise ValueError(f"{label} is {tensor.dtype}, expected {' or '.join(map(str, allowed))}")
        if tensor.device != device:
            raise ValueError(f"{label} is on {tensor.device}, expected {device}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{label} has stride {tensor.stride(-1)} in its last dimension, expected 1")
        dtypes[label] = tensor.dtype
