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
Size = tuple[str, int, int]  # a dimension's letters, what is added to their length, and the divisor


def operation(*tensors: str, check: Callable[..., None] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a specification, then call it, or the kernel of its name where `path_for` says so.

    tensors: `name dtype dimensions`; the first one's device is that of all. name: an argument, or record.field. dtype:
    `float`, an earlier tensor's name, or PyTorch's. The same letters are the same length, also in S+1 and D/2; H is a
    multiple of Hkv. None is not checked. check: of other arguments, which are passed by name.
    """
    rules = [
        (*name.partition(".")[::2], dtype, [_size(text) for text in sizes])
        for name, dtype, *sizes in map(str.split, tensors)
    ]

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
        specification = getattr(import_module(f"{specification.__module__}.kernel"), name)
    return specification(**arguments)


def _size(text: str) -> Size:
    base, _, divisor = text.partition("/")
    letters, _, added = base.partition("+")
    return letters, int(added or 0), int(divisor or 1)


def _check(rules: list[tuple[str, str, str, list[Size]]], arguments: dict[str, Any]) -> None:
    """ValueError says a tensor's shape, dtype, device or stride, and what is expected."""
    lengths = {"1": 1, "2": 2}
    dtypes: dict[str, torch.dtype] = {}
    device, keys = arguments[rules[0][0]].device, ""
    for name, field, dtype, sizes in rules:
        value, label = arguments[name], field or name
        if field:
            value = getattr(value, field)
        if value is None:
            continue
        allowed = FLOATS if dtype == "float" else (dtypes.get(dtype) or getattr(torch, dtype),)
        parts = {label: value}
        if not isinstance(value, torch.Tensor):
            parts = {f"{label}[{i}]": item for i, item in enumerate(value)}
        for label, tensor in parts.items():
            shape = tensor.shape
            expected: list[int | str] = []
            differs = len(shape) != len(sizes)
            # A loop, since it runs before every launch.
            for have, (letters, added, divisor) in zip(shape, sizes, strict=False):
                if letters in lengths:
                    expected.append((lengths[letters] + added) // divisor)
                    differs |= have != expected[-1]
                else:
                    expected.append(f"{letters}+{added}" if added else letters)
                    lengths[letters] = have - added
                    keys = label if letters == "Hkv" else keys
            if differs:
                expected += [letters for letters, *_ in sizes[len(expected) :]]
                raise ValueError(f"{label} has shape {list(shape)}, expected [{', '.join(map(str, expected))}]")
            if tensor.dtype not in allowed:
                raise ValueError(f"{label} is {tensor.dtype}, expected {' or '.join(map(str, allowed))}")
            if tensor.device != device:
                raise ValueError(f"{label} is on {tensor.device}, expected {device}")
            if shape[-1] > 1 and tensor.stride(-1) != 1:
                raise ValueError(f"{label} has stride {tensor.stride(-1)} in its last dimension, expected 1")
            dtypes[label] = tensor.dtype
    if keys and (lengths["Hkv"] == 0 or lengths["H"] % lengths["Hkv"]):
        raise ValueError(f"q has {lengths['H']} heads, expected a multiple of the {lengths['Hkv']} of {keys}")
