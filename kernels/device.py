"""Device properties that launches need, and the kernels that were compiled; the interpreter is a small device."""

from functools import cache
from typing import Any

import torch

_ready: set[str] = set()  # name and key of each kernel that Triton compiled or loaded from disk


@cache
def num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may use; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def interpreted(tensor: torch.Tensor) -> bool:
    """Whether Triton's interpreter runs the kernel; its `dot` reads bf16 bits as integers, so widen first."""
    return not tensor.is_cuda


def logits_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in fp32: rounded logits would tie."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return torch.nn.functional.linear(x.float(), weight.float())


def num_compilations() -> int:
    """Kernels compiled or loaded since the first call; 0 without Triton."""
    _watch()
    return len(_ready)


@cache
def _watch() -> None:
    """Have Triton call us when a launch finds no kernel in memory."""
    try:
        from triton import knobs
    except ImportError:
        return
    before = knobs.runtime.jit_cache_hook

    def add(*args: Any, **kwargs: Any) -> bool | None:
        _ready.add(f"{kwargs.get('repr')} {kwargs.get('key')}")
        return before(*args, **kwargs) if before is not None else None  # true would skip the compilation

    knobs.runtime.jit_cache_hook = add
