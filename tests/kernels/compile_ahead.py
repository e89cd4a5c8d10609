"""Compiles every kernel for a GPU that need not be there: `python compile_ahead.py 90 [all]` (the compute capability).

Launchers are called as they are, on the CPU, with a driver that only names the GPU; a launch stops after compilation.
One variant of each kernel is compiled, in bf16 at SDAR-8B's widths, or all that the launchers choose between.
"""

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dsim.kernels import device, use

CAPABILITY = int(sys.argv[1])
ALL = "all" in sys.argv
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}[CAPABILITY]
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if ALL else (torch.bfloat16,)
HEAD_DIMS = (64, 128) if ALL else (128,)


class NamedOnly:
    """What a compilation asks a driver for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


run = JITFunction.run
compiled: dict[str, list[int]] = {}  # the shared memory of a kernel's variants, by its name


def compile_only(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
    done = run(kernel, *args, warmup=True, **kwargs)
    compiled.setdefault(f"{kernel.__module__}.{kernel.__name__}", []).append(done.metadata.shared)
    assert done.metadata.shared <= SHARED_MEMORY, (kernel.__name__, done.metadata.shared)
    return done


JITFunction.run = compile_only
driver.set_active(NamedOnly())
device.interpreted = lambda _: False
device.num_multiprocessors = lambda _: 100
device.shared_memory = lambda _: SHARED_MEMORY


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention() -> None:
    from dsim.kernels.ragged_paged_attention import ragged_paged_attention

    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for queries in (1, 4, 32) if ALL else (8,):
                pages = torch.zeros(512, 16, 8, head_dim, dtype=dtype)
                ragged_paged_attention(
                    torch.zeros(2 * queries, 32, head_dim, dtype=dtype), pages, pages,
                    torch.arange(512, dtype=torch.int32).view(2, 256), int32(0, queries, 2 * queries),
                    torch.zeros(2 * queries, dtype=torch.int32), int32(4, 9), torch.ones(2, 32, dtype=torch.bool), 32,
                )  # fmt: skip


def scatter() -> None:
    from dsim.kernels.kv_scatter import kv_scatter

    for dtype in DTYPES:
        rows, pages = torch.zeros(3, 8, 128, dtype=dtype), torch.zeros(4, 16, 8, 128, dtype=dtype)
        kv_scatter(rows, rows, pages, pages, torch.arange(3))


def confidences() -> None:
    from dsim.kernels.confidence import confidence, confidence_of_hidden

    for dtype in DTYPES:
        confidence(torch.zeros(3, 151936, dtype=dtype))
        for num_rows in (3, 200) if ALL else (200,):
            confidence_of_hidden(torch.zeros(num_rows, 4096, dtype=dtype), torch.zeros(1000, 4096, dtype=dtype))


def focus() -> None:
    from dsim.kernels.compact import compact
    from dsim.kernels.focus_importance import focus_importance
    from dsim.kernels.focus_select import focus_select

    starts, ones = int32(0, 1, 3), int32(1, 1)
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            q, k = torch.zeros(3, 4, head_dim, dtype=dtype), torch.zeros(3, 2, head_dim, dtype=dtype)
            importance = focus_importance(q, k, torch.arange(3), starts)
        compact(torch.ones(3, dtype=torch.bool), starts, q, k, torch.zeros(3, 4096), torch.arange(3))
    focus_select(importance, importance, torch.arange(3), starts, int32(0, 1, 2), ones, ones, ones, 1.5)


def full_sequence() -> None:
    from dsim.kernels.mask_vote import mask_vote
    from dsim.kernels.pooled_topk_pack import pooled_topk_pack

    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            q, k = torch.zeros(3, 4, head_dim, dtype=dtype), torch.zeros(3, 2, head_dim, dtype=dtype)
            mask_vote(q, k, torch.arange(2), int32(0, 2), int32(0, 3), int32(1))
            pages = torch.zeros(1, 16, 2, head_dim, dtype=dtype)
            for shared in (True, False) if ALL else (False,):
                pooled_topk_pack(
                    q[:1], k, k, int32(0, 1), int32(0, 3), int32(1), int32(2), pages, pages, int32(0).view(1, 1), 3,
                    shared,
                )  # fmt: skip


with use("triton"):
    for part in (attention, scatter, confidences, focus, full_sequence):
        part()
for name, shared in compiled.items():
    print(name, *shared)
