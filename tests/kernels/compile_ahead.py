"""Compiles every kernel for GPUs that need not be there: `python compile_ahead.py 90 ... [all]` (compute capabilities).

Launchers are called as they are, on the CPU, with a driver that only names the GPU; a launch stops after compilation.
Each kernel is compiled as an SDAR-8B step launches it, in bf16, or in all variants that the launchers choose between.
A line is printed for each, as JSON: what the assembler says of it. `programs` is how many a multiprocessor holds.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dsim.kernels import device, use

ALL = "all" in sys.argv


def each_in_a_process_of_its_own(capabilities: list[int]) -> int:
    """The one that this process compiles for: of several the last, and those before it were forked and have ended."""
    for capability in capabilities[:-1]:
        child = os.fork()
        if child == 0:
            return capability
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(1)
    return capabilities[-1]


CAPABILITY = each_in_a_process_of_its_own([int(word) for word in sys.argv[1:] if word != "all"])
SHARED_MEMORY = 1024 * {80: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}[CAPABILITY]
PRODUCTS = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}  # instructions by name
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
case = ""


def facts(name: str, done: Any) -> dict[str, Any]:
    """What one compiled kernel takes of a multiprocessor, and how it loads and multiplies."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    taken = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx, shared, warps = done.asm["ptx"], done.metadata.shared, done.metadata.num_warps
    by_registers = 65536 // (-(-taken["reg"] * 32 // 256) * 256 * warps)
    return {
        "capability": CAPABILITY, "kernel": name, "case": case, "warps": warps, "registers": taken["reg"],
        "spilled": taken["stack"] + taken["local"], "shared": shared,
        "programs": min(by_registers, (SHARED_MEMORY + 1024) // (shared + 1024), 64 // warps),
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32|cp\.async\.cg[^;]*, 0x10", ptx)),
        "tensor_cores": next((name for name, found in PRODUCTS.items() if found in ptx), ""),
    }  # fmt: skip


def compile_only(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
    done = run(kernel, *args, warmup=True, **kwargs)
    assert done.metadata.shared <= SHARED_MEMORY, (kernel.__name__, done.metadata.shared)
    print(json.dumps(facts(f"{kernel.__module__}.{kernel.__name__}", done)))
    return done


JITFunction.run = compile_only
driver.set_active(NamedOnly())
device.interpreted = lambda _: False
device.num_multiprocessors = lambda _: 132
device.shared_memory = lambda _: SHARED_MEMORY


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention() -> None:
    """Batches of 64, and of 2 whose keys are split, with so many queries each; of all variants also short pages."""
    global case
    from dsim.kernels.ragged_paged_attention import Sequences, ragged_paged_attention

    for dtype, head_dim, page in itertools.product(DTYPES, HEAD_DIMS, (64, 16) if ALL else (64,)):
        for batch, queries in itertools.product((64, 2), (2, 8, 16, 32)):
            case = f"{batch} x {queries} queries"
            pages = torch.zeros(1, page, 8, head_dim, dtype=dtype)
            ragged_paged_attention(
                torch.zeros(batch * queries, 32, head_dim, dtype=dtype), pages, pages,
                Sequences(
                    torch.zeros(batch, 2048 // page, dtype=torch.int32), int32(*range(0, batch * queries + 1, queries)),
                    torch.zeros(batch * queries, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32),
                    torch.ones(batch, 32, dtype=torch.bool), 32,
                ),
                check=False,
            )  # fmt: skip
    case = ""


def scatter() -> None:
    from dsim.kernels.kv_scatter import kv_scatter

    for dtype in DTYPES:
        rows, pages = torch.zeros(3, 8, 128, dtype=dtype), torch.zeros(4, 64, 8, 128, dtype=dtype)
        kv_scatter(rows, rows, pages, pages, torch.arange(3))


def confidences() -> None:
    global case
    from dsim.kernels.confidence import confidence, confidence_of_hidden

    for dtype in DTYPES:
        confidence(torch.zeros(3, 151936, dtype=dtype))
        for num_rows in (3, 20, 64, 128) if ALL else (64, 128):
            case = f"{num_rows} rows"
            confidence_of_hidden(torch.zeros(num_rows, 4096, dtype=dtype), torch.zeros(1000, 4096, dtype=dtype))
    case = ""


def elementwise() -> None:
    """Between the matrix products of a layer, at SDAR-8B's widths; of all variants a norm without a sum."""
    global case
    from dsim.kernels.add_rms_norm import add_rms_norm
    from dsim.kernels.qk_norm_rope import qk_norm_rope
    from dsim.kernels.swiglu import swiglu

    for dtype in DTYPES:
        x, weight = torch.zeros(3, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
        for added in (x, None) if ALL else (x,):
            case = "" if added is x else "nothing added"
            add_rms_norm(x, added, weight, 1e-6)
        case = ""
        swiglu(torch.zeros(3, 2 * 12288, dtype=dtype))
        for head_dim, normed in itertools.product(HEAD_DIMS, (True, False) if ALL else (True,)):
            case = "" if normed else "not normed"
            angles, weight = torch.zeros(3, head_dim // 2, dtype=dtype), torch.zeros(head_dim, dtype=dtype)
            of_head = weight if normed else None
            qkv = torch.zeros(3, 32 + 2 * 8, head_dim, dtype=dtype)
            qk_norm_rope(qkv, 32, of_head, of_head, 1e-6, angles, angles)
    case = ""


def focus() -> None:
    from dsim.kernels.compact import compact
    from dsim.kernels.focus_importance import focus_importance
    from dsim.kernels.focus_select import Masks, focus_select

    starts, ones = int32(0, 1, 3), int32(1, 1)
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            q, k = torch.zeros(3, 4, head_dim, dtype=dtype), torch.zeros(3, 2, head_dim, dtype=dtype)
            importance = focus_importance(q, k, torch.arange(3), starts)
        compact(torch.ones(3, dtype=torch.bool), starts, q, k, torch.zeros(3, 4096), torch.arange(3))
    masks = Masks(torch.arange(3), starts, int32(0, 1, 2), ones, ones, ones)
    focus_select(importance, importance, masks, 1.5)


def full_sequence() -> None:
    from dsim.kernels.mask_vote import mask_vote
    from dsim.kernels.pooled_topk_pack import Choice, pooled_topk_pack

    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            q, k = torch.zeros(3, 4, head_dim, dtype=dtype), torch.zeros(3, 2, head_dim, dtype=dtype)
            mask_vote(q, k, torch.arange(2), int32(0, 2), int32(0, 3), int32(1))
            pages = torch.zeros(1, 16, 2, head_dim, dtype=dtype)
            for shared in (True, False) if ALL else (False,):
                choice = Choice(int32(0, 1), int32(0, 3), int32(1), int32(2), int32(0).view(1, 1), 3, shared)
                pooled_topk_pack(q[:1], k, k, pages, pages, choice)


def experts() -> None:
    """LLaDA2.0-mini's: 256 experts, of which a row has 8."""
    from dsim.kernels.grouped_experts import grouped_experts

    for dtype, activation in itertools.product(DTYPES, ("gelu", "silu") if ALL else ("gelu",)):
        gate_up, down = torch.zeros(256, 1024, 2048, dtype=dtype), torch.zeros(256, 2048, 512, dtype=dtype)
        chosen = torch.arange(8).expand(3, 8).contiguous()
        grouped_experts(torch.zeros(3, 2048, dtype=dtype), chosen, torch.ones(3, 8), gate_up, down, activation)


with use("triton"):
    for part in (attention, scatter, confidences, elementwise, focus, full_sequence, experts):
        part()
