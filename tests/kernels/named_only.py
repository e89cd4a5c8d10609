"""A driver that only names a GPU, for kernels that are compiled, or asked for, where there is none."""

from types import SimpleNamespace

from triton.backends.compiler import GPUTarget


def named_only(capability: int) -> SimpleNamespace:
    target = GPUTarget("cuda", capability, 32)
    answers = {"get_current_target": lambda: target, "get_current_device": lambda: 0, "get_current_stream": lambda _: 0}
    return SimpleNamespace(**answers)
