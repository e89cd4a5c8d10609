"""Compiles every kernel for a GPU that need not be there: `python compile_ahead.py 90` (the compute capability).

The interpreter runs much that the compiler refuses. Launchers are called as they are, on the CPU, with a driver that
only names the GPU; every launch stops after compilation.
"""

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dsim.kernels import device, use

CAPABILITY = int(sys.argv[1])
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}[CAPABILITY]


class NamedOnly:
    """What a compilation asks a driver for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


class Compiled:
    """Kernels by name, and the shared memory of each of their variants."""

    def __init__(self) -> None:
        self.kernels: dict[str, list[int]] = {}

    def run(self, kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        done = RUN(kernel, *args, warmup=True, **kwargs)
        self.kernels.setdefault(f"{kernel.__module__}.{kernel.__name__}", []).append(done.metadata.shared)
        assert done.metadata.shared <= SHARED_MEMORY
        return done


RUN = JITFunction.run
compiled = Compiled()
JITFunction.run = lambda self, *args, **kwargs: compiled.run(self, *args, **kwargs)
driver.set_active(NamedOnly())
device.interpreted = lambda _: False
device.num_multiprocessors = lambda _: 100
device.shared_memory = lambda _: SHARED_MEMORY


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention() -> None:
    from dsim.kernels.ragged_paged_attention import ragged_paged_attention

    for dtype, queries in ((torch.float32, 2), (torch.bfloat16, 2), (torch.bfloat16, 32), (torch.float16, 4)):
        for head_dim in (64, 128):
            pages = torch.zeros(4, 16, 2, head_dim, dtype=dtype)
            ragged_paged_attention(
                torch.zeros(2 * queries, 8, head_dim, dtype=dtype), pages, pages, int32(0, 1, 2, 3).view(2, 2),
                int32(0, queries, 2 * queries), torch.zeros(2 * queries, dtype=torch.int32), int32(4, 9),
                torch.ones(2, 4, dtype=torch.bool), 4,
            )  # fmt: skip


def scatter() -> None:
    from dsim.kernels.kv_scatter import kv_scatter

    rows, pages = torch.zeros(3, 2, 64, dtype=torch.bfloat16), torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
    kv_scatter(rows, rows, pages, pages, torch.arange(3))


def confidences() -> None:
    from dsim.kernels.confidence import confidence, confidence_of_hidden

    for dtype in (torch.float32, torch.bfloat16):
        confidence(torch.zeros(3, 151936, dtype=dtype))
        for num_rows in (3, 200):
            confidence_of_hidden(torch.zeros(num_rows, 256, dtype=dtype), torch.zeros(1000, 256, dtype=dtype))


def focus() -> None:
    from dsim.kernels.compact import compact
    from dsim.kernels.focus_importance import focus_importance
    from dsim.kernels.focus_select import focus_select

    starts, ones = int32(0, 1, 3), int32(1, 1)
    for dtype in (torch.float32, torch.bfloat16):
        q, k = torch.zeros(3, 4, 128, dtype=dtype), torch.zeros(3, 2, 128, dtype=dtype)
        importance = focus_importance(q, k, torch.arange(3), starts)
    focus_select(importance, importance, torch.arange(3), starts, int32(0, 1, 2), ones, ones, ones, 1.5)
    compact(torch.ones(3, dtype=torch.bool), starts, q, k, torch.zeros(3, 4096), torch.arange(3))


with use("triton"):
    for part in (attention, scatter, confidences, focus):
        part()
for name, shared in compiled.kernels.items():
    print(name, *shared)
