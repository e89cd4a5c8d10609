"""Compiles every kernel for GPUs that need not be there: `python compile_ahead.py [--few] 90 ...` (capabilities).

Launchers are called as they are, on the CPU, with a driver that only names the GPU; a launch stops after compilation.
Each kernel is compiled as a step of SDAR-8B, of a model with experts or of DiffusionGemma launches it, in bf16; for a
GPU of little shared memory only attention and experts, whose tiles differ there. --few compiles each kernel and tile
and leaves out shapes that differ in nothing else. A line of JSON is printed for each, from the assembler; `programs` is
the number that a multiprocessor holds.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dsim.kernels import device, use
from dsim.tests.kernels.places import int32, named_only


def each_in_a_process_of_its_own(capabilities: list[int]) -> int:
    """The one that this process compiles for: of several the last, and those before it were forked and have ended."""
    for capability in capabilities[:-1]:
        child = os.fork()
        if child == 0:
            return capability
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(1)
    return capabilities[-1]


FEW = "--few" in sys.argv
CAPABILITY = each_in_a_process_of_its_own([int(word) for word in sys.argv[1:] if word.isdigit()])
SHARED_MEMORY = 1024 * {80: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}[CAPABILITY]
PRODUCTS = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}  # instructions by name
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
driver.set_active(named_only(CAPABILITY))
device.interpreted = lambda _: False
device.num_multiprocessors = lambda _: 132
device.shared_memory = lambda _: SHARED_MEMORY


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def attention() -> None:
    """Batches of 64, and of 2 whose keys are split, with so many queries each."""
    global case
    from dsim.kernels.ragged_paged_attention import Sequences, ragged_paged_attention

    pages = bf16(1, 64, 8, 128)
    shapes = [(64, 2), (64, 32), (2, 8), (2, 16)] if FEW else [(n, rows) for n in (64, 2) for rows in (2, 8, 16, 32)]
    for batch, queries in shapes:
        case = f"{batch} x {queries} queries"
        rows, none = batch * queries, torch.zeros(batch * queries, dtype=torch.int32)
        listed, starts = torch.ones(batch, 32, dtype=torch.bool), int32(*range(0, rows + 1, queries))
        seen = Sequences(torch.zeros(batch, 32, dtype=torch.int32), starts, none, none[:batch], listed, 32)
        ragged_paged_attention(bf16(rows, 32, 128), pages, pages, seen)
    case = ""


def canvases() -> None:
    """Two canvases of DiffusionGemma's, and the same rows of text."""
    global case
    from dsim.kernels.qk_norm_rope import Norms, Pages, Turns, qk_norm_rope
    from dsim.kernels.ragged_paged_attention import WHOLE, Sequences, ragged_paged_attention
    from dsim.kernels.read_logits import read_logits

    table, starts, ends = torch.zeros(2, 32, dtype=torch.int32), int32(0, 256, 512), int32(1280, 1280)
    positions = torch.arange(1024, 1280).repeat(2).int()
    text = Sequences(table, starts, positions, ends, torch.zeros(2, 1, dtype=torch.bool), 1)
    canvas = Sequences(table, starts, positions, ends - 256, torch.ones(2, 256, dtype=torch.bool), WHOLE)
    for head_dim, kv_heads, window in ((256, 8, 1024), (512, 2, 0)):
        pages = bf16(1, 64, kv_heads, head_dim)
        for causal in [window > 0] if FEW else (False, True):
            case = f"heads of {head_dim}{', causal' if causal else ''}"
            sequences = text if causal else canvas
            ragged_paged_attention(bf16(512, 16, head_dim), pages, pages, sequences, window, 1.0)
        case = f"heads of {head_dim}"
        norms, half = Norms(bf16(head_dim), bf16(head_dim), 1e-6), bf16(3, head_dim // 2)
        qkv = bf16(3, 16 + 2 * kv_heads, head_dim)
        qk_norm_rope(qkv, 16, norms, Turns(half, half), Pages(pages, pages, torch.arange(3)))
    case = "DiffusionGemma"
    read_logits(bf16(2, 262144), torch.ones(2), torch.ones(2), 30.0)
    case = ""


def experts() -> None:
    """A step's experts: SDAR-30B-A3B's and LLaDA2.0-mini's."""
    global case
    from dsim.kernels.grouped_experts import grouped_experts

    for num, ffn in ((128, 768), (256, 512))[: 1 if FEW else 2]:  # SDAR-30B-A3B's experts, and LLaDA2.0-mini's
        matrices = bf16(1, 2 * ffn, 2048).expand(num, -1, -1), bf16(1, 2048, ffn).expand(num, -1, -1)
        for rows in (1, 2, 4, 8) if num == 128 else (8,):
            case = f"{num} experts, a step of {128 * rows} rows"
            chosen = torch.arange(8).expand(128 * rows, 8)
            grouped_experts(bf16(128 * rows, 2048), chosen, torch.ones(128 * rows, 8), *matrices, "gelu")
    case = ""


def others() -> None:
    """All other kernels."""
    global case
    from dsim.kernels.confidence import confidence
    from dsim.kernels.focus_importance import focus_importance
    from dsim.kernels.pooled_topk_pack import Choice, pooled_topk_pack
    from dsim.kernels.qk_norm_rope import Norms, Pages, Turns, qk_norm_rope

    confidence(bf16(3, 151936))
    norms, turns, pages = Norms(bf16(128), bf16(128), 1e-6), Turns(bf16(3, 64), bf16(3, 64)), bf16(4, 64, 8, 128)
    qk_norm_rope(bf16(3, 48, 128), 32, norms, turns, Pages(pages, pages, torch.arange(3)))
    q, k = bf16(3, 4, 128), bf16(3, 2, 128)
    focus_importance(q, k, torch.arange(3), int32(0, 1, 3))
    choice = Choice(int32(0, 1), int32(0, 3), int32(1), int32(2), int32(0).view(1, 1))
    pooled_topk_pack(q[:1], k, k, bf16(1, 16, 2, 128), bf16(1, 16, 2, 128), choice)


with use("triton"):
    attention()
    experts()
    if SHARED_MEMORY >= 200 * 1024:
        others()
        canvases()
