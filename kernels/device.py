"""Device properties that launches need; the interpreter counts as a small device."""

from functools import cache

import torch


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
