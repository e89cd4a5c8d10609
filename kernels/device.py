"""The facts of the device that a launch needs; under the interpreter, that it is small."""

from functools import cache

import torch


@cache
def num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may use."""
    if device.type != "cuda":
        return 0
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def interpreted(tensor: torch.Tensor) -> bool:
    """Whether Triton's interpreter runs the kernel: its `dot` takes the bits of bf16 for integers, so widen first."""
    return not tensor.is_cuda
