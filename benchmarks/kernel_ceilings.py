"""How near kernels come to ceilings: `python benchmarks/kernel_ceilings.py [--json FILE] [--only GROUP ...]`

Copy bandwidth and matrix product rate are measured in the same run. A case is checked against its reference, then
timed: the median of launches from a captured graph, the cache flushed before each. A line has the time, the share of
the floor (least time of its bytes and operations at the ceilings), the best PyTorch alternative relative to the kernel,
and the target for the share of the faster of the two. A failing case says why. No case begins after --seconds. The JSON
also has each launch's time, an eager call's cost to the host, and the device's clocks, power and throttling.

--flex also times FlexAttention, which compiles slowly. --tune also checks and times the module's other ways to compile.
--smoke runs tiny cases under Triton's interpreter, a trial without a GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from dsim.kernels import taken, use
from dsim.profiler.clocks import Clocks, clocks_of

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 32, 8, 128, 4096, 151936  # SDAR-8B
NUM_PARAMETERS = 7.568e9  # of layers and head, multiplied in a step
REPEATS = 50


# Other ways to compile a kernel, by the launched one: of confidence, attention, experts and windows.
OTHERS: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {
    (4096, 8, 8): ((2048, 4, 16), (8192, 8, 4), (4096, 4, 8)),
    (64, 4, 3, 2): ((64, 4, 4), (32, 4, 5), (32, 2, 4)),
    (32, 4, 5, 2): ((64, 4, 3), (64, 4, 4), (64, 8, 3)),
    (32, 4, 4, 2): ((64, 4, 3), (64, 4, 2), (64, 8, 3)),
    (64, 8, 3, 1): ((64, 8, 4), (64, 8, 2), (32, 8, 5)),
    (32, 8, 3, 1): ((32, 4, 3), (32, 8, 2), (64, 8, 2)),
    (32, 4, 3, 1): ((32, 4, 2),),
    (16, 64, 64, 4, 4, 0, 0): ((16, 64, 128, 4, 3), (16, 32, 128, 4, 4), (16, 128, 64, 4, 4)),
    (32, 64, 64, 4, 4, 0, 0): ((32, 64, 128, 4, 3), (32, 128, 64, 8, 3)),
    (64, 64, 64, 4, 4, 0, 0): ((64, 128, 64, 8, 3), (64, 64, 64, 8, 4)),
    (128, 128, 64, 8, 4, 32, 3): ((128, 128, 64, 8, 3, 32), (128, 64, 64, 4, 3, 32), (128, 128, 64, 8, 3)),
    (128, 64, 8, 3, 1): ((128, 64, 4, 3), (64, 64, 4, 3)),
    (128, 32, 8, 3, 1): ((128, 64, 8, 2), (64, 32, 4, 3)),
    (128, 32, 8, 2, 2): ((64, 32, 8, 2), (64, 32, 4, 2, 2), (64, 16, 8, 3)),
}


def ways(launched: Any) -> list[Any]:
    """The launched way to compile a kernel, and others to time."""
    return [launched, *(type(launched)(*other) for other in OTHERS.get(launched, ()))]


def specification(operation: Any) -> Callable[..., Any]:
    """An operation in plain PyTorch."""
    return operation.__wrapped__


@dataclass
class Case:
    """A kernel at a shape."""

    name: str
    shape: str
    run: Callable[[], Any]
    right: Callable[[Any], bool]
    num_bytes: float = 0.0  # least moved
    flops: float = 0.0  # least computed
    target: float | None = None  # share of the floor
    floor: float | None = None  # s; None: by the ceilings
    alternatives: dict[str, Callable[[], Any]] = field(default_factory=dict)
    candidates: dict[str, Callable[[], Any]] = field(default_factory=dict)  # ways to compile it, the launched one first
    ours: bool = True  # else a library's


@dataclass(frozen=True)
class Size:
    """A case's sizes: large, or for the interpreter."""

    device: str
    batch: int
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: tuple[int, int]
    head_dim: int
    hidden: int
    vocabulary: int
    rows: tuple[int, ...]
    length: int
    experts: tuple[tuple[str, int, int, int, int, str], ...]  # hidden, ffn, experts, experts of a row, activation
    expert_rows: tuple[int, ...]
    canvas: tuple[int, int, int]  # positions, hidden, vocabulary
    wide: tuple[tuple[int, int, int, int], ...]  # heads, KV heads, dimension, window of a canvas model's layers
    flex: bool = False


FULL = Size(
    "cuda", 64, (2, 8, 32), (512, 2048, 8192), (HEADS, KV_HEADS), HEAD_DIM, HIDDEN, VOCABULARY, (64, 2048), 2048,
    (
        ("SDAR-30B-A3B", 2048, 768, 128, 8, "silu"), ("LLaDA2-mini", 2048, 512, 256, 8, "silu"),
        ("DiffusionGemma", 2816, 704, 128, 8, "gelu"),
    ),
    (32, 512, 2048, 8192), (256, 2816, 262144), ((16, 8, 256, 1024), (16, 2, 512, 0)),
)  # fmt: skip
SMOKE = Size(
    "cpu", 2, (2,), (40,), (4, 2), 64, 64, 1000, (3,), 90, (("toy", 64, 32, 4, 2, "silu"),), (9,), (5, 64, 1000),
    ((2, 1, 32, 8),),
)  # fmt: skip


class Clock:
    """On the device, or by the wall clock in a smoke run."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self.state = clocks_of(str(torch.cuda.get_device_properties(0).uuid)) if self._cuda else Clocks(None)
        self._flush = torch.empty(2**30 if self._cuda else 1, dtype=torch.int8, device=device)

    def seconds(self, run: Callable[[], Any]) -> list[float]:
        """By launch."""
        if not self._cuda:
            start = time.perf_counter()
            run()
            return [time.perf_counter() - start]
        launch = self._captured(run)
        took = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            begin.record()
            launch()
            end.record()
            self.state.sample()  # while the device works
            torch.cuda.synchronize()
            took.append(begin.elapsed_time(end) / 1e3)
        return took

    def host(self, run: Callable[[], Any]) -> float:
        """s until an eager call returns."""
        calls = 10 if self._cuda else 1
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        took = (time.perf_counter() - begin) / calls
        if self._cuda:
            torch.cuda.synchronize()
        return took

    def _captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """As a graph, or unchanged if it cannot be captured."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except RuntimeError:
            torch.cuda.synchronize()
            return run
        return graph.replay


def ceilings(size: Size, clock: Clock) -> dict[str, float]:
    """Bytes/s of a copy (read and written), FLOP/s of a bf16 product: medians."""
    num, n = (2**30, 8192) if size.device == "cuda" else (2**16, 64)
    source = torch.zeros(num, dtype=torch.int8, device=size.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(n, n, device=size.device).bfloat16() for _ in range(2))
    copied = statistics.median(clock.seconds(lambda: target.copy_(source)))
    multiplied = statistics.median(clock.seconds(lambda: a @ b))
    return {"copy_bandwidth": 2 * num / copied, "matmul_rate": 2 * n**3 / multiplied}


def int32(values: list[int] | torch.Tensor, device: str) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=device)


def attention(size: Size, _: dict[str, float]) -> Iterator[Case]:
    """Decode steps over long histories, by last block; one prefill."""
    from dsim.kernels.ragged_paged_attention import Sequences, ragged_paged_attention

    page, device = 64, size.device
    shapes = [(size.batch, queries, context) for context in size.contexts for queries in size.queries]
    shapes = [(1, 32, size.contexts[0]), *shapes, (1, 2 * size.length, 0)]
    (num_heads, num_kv_heads), d, block = size.heads, size.head_dim, 32
    for batch, queries, context in shapes:
        prefill = context == 0
        num_keys = queries if prefill else context + queries
        held = -(-num_keys // page)
        k_pages, v_pages = (
            torch.randn(batch * held, page, num_kv_heads, d, device=device).bfloat16() for _ in range(2)
        )
        table = int32(torch.randperm(batch * held).view(batch, held), device)
        if batch == 1 and not prefill:  # as wide as in a captured step
            table = F.pad(table, (0, size.contexts[-1] // page * 4), value=-1)
        q = torch.randn(batch * queries, num_heads, d, device=device).bfloat16()
        history = int32([num_keys if prefill else context] * batch, device)
        listed = torch.zeros(batch, block, dtype=torch.bool, device=device)
        listed[:, :queries] = not prefill
        positions = int32((torch.arange(queries) + (0 if prefill else context)).repeat(batch), device)
        starts = int32([queries * i for i in range(batch + 1)], device)
        arguments = (q, k_pages, v_pages, Sequences(table, starts, positions, history, listed, block))

        def run(arguments: Any = arguments) -> torch.Tensor:
            return ragged_paged_attention(*arguments)

        def right(found: torch.Tensor, arguments: Any = arguments, largest: float = float(v_pages.abs().max())) -> bool:
            expected = specification(ragged_paged_attention)(*arguments)
            return float((found.float() - expected.float()).abs().max()) <= torch.finfo(torch.bfloat16).eps * largest

        dense_k, dense_v = (
            pages[table[:, :held].long()].flatten(1, 2)[:, :num_keys].transpose(1, 2).contiguous()
            for pages in (k_pages, v_pages)
        )
        dense_q = q.view(batch, queries, num_heads, d).transpose(1, 2).contiguous()
        if prefill:
            blocks = torch.arange(num_keys, device=device) // block
            mask = blocks[None, :] <= blocks[:, None]
            seen = int(mask.sum())
        else:
            mask, seen = None, batch * queries * num_keys

        def sdpa(a: Any = (dense_q, dense_k, dense_v), mask: Any = mask) -> torch.Tensor:
            return F.scaled_dot_product_attention(*a, attn_mask=mask, enable_gqa=True)

        alternatives: dict[str, Callable[[], Any]] = {"sdpa": sdpa}
        if size.flex:
            alternatives["flex_attention"] = flex((dense_q, dense_k, dense_v), block if prefill else None)
        step = "prefill" if prefill else f"batch {batch}, q {queries}"
        yield Case(
            "ragged_paged_attention",
            f"{step}, keys {num_keys}",
            run,
            right,
            num_bytes=2.0 * (2 * q.numel() + 2 * batch * num_keys * num_kv_heads * d),
            flops=4.0 * num_heads * d * seen,
            target=0.7 if not prefill and batch > 1 else None,
            alternatives=alternatives,
            candidates=attention_candidates(arguments),
        )


def attention_candidates(arguments: Any) -> dict[str, Callable[[], Any]]:
    """The launched tiles, others, then other splits of the keys."""
    from dsim.kernels.ragged_paged_attention import ragged_paged_attention_kernel as kernel

    q, k_pages, _, sequences = arguments
    tiles = ways(kernel.tile_for(kernel.rows_of_a_tile(q, len(sequences.page_table), k_pages.shape[2]), q))

    def way(tile: Any, num_splits: int | None) -> Callable[[], Any]:
        return lambda: kernel.ragged_paged_attention(*arguments, num_splits=num_splits, tile=tile)

    return {str(tile): way(tile, None) for tile in tiles} | {f"{n} splits": way(tiles[0], n) for n in (1, 2, 4)}


def flex(qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], block: int | None) -> Callable[[], torch.Tensor]:
    """Compiled, on the same keys as a dense tensor."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # one compilation per shape
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if block is not None:
        n = qkv[0].shape[2]
        mask = create_block_mask(lambda b, h, i, j: j // block <= i // block, None, None, n, n, device="cuda")
    return lambda: compiled(*qkv, block_mask=mask, enable_gqa=True)


def confidences(size: Size, _: dict[str, float]) -> Iterator[Case]:
    """From logits, and from hidden states through the head."""
    from dsim.kernels.confidence import confidence, confidence_of_hidden
    from dsim.kernels.confidence import confidence_kernel as kernel

    head = torch.zeros(0)
    plain = [(rows, size.hidden, size.vocabulary) for rows in size.rows]
    for rows, width, vocabulary in [*plain, size.canvas]:
        if len(head) != vocabulary:
            head = (torch.randn(vocabulary, width, device=size.device) / width**0.5).bfloat16()
        logits = 4 * torch.randn(rows, vocabulary, device=size.device).bfloat16()
        hidden = torch.randn(rows, width, device=size.device).bfloat16()

        def same(found: Any, expected: Any, agree: float) -> bool:
            """Another order of sums may break ties otherwise."""
            equal = (found[0] == expected[0]).float().mean() >= agree
            return bool(equal) and torch.allclose(found[1], expected[1], rtol=1e-3, atol=0)

        yield Case(
            "confidence",
            f"{rows} rows of {vocabulary}",
            lambda logits=logits: confidence(logits, 0.8),
            lambda found, logits=logits: same(found, specification(confidence)(logits, 0.8), 1.0),
            num_bytes=2.0 * logits.numel(),
            target=0.8,
            alternatives={"softmax and max": lambda logits=logits: (logits / 0.8).softmax(-1).max(-1)},
            candidates={
                str(how): lambda logits=logits, how=how: kernel.confidence(logits, 0.8, how=how)
                for how in ways(kernel.Pass())
            },
        )
        yield Case(
            "confidence_of_hidden",
            f"{rows} rows of {width} to {vocabulary}",
            lambda hidden=hidden, head=head: confidence_of_hidden(hidden, head, 0.8),
            lambda found, hidden=hidden, head=head: same(
                found, specification(confidence_of_hidden)(hidden, head, 0.8, 256), 0.99
            ),
            num_bytes=2.0 * (head.numel() + hidden.numel()),
            flops=2.0 * rows * head.numel(),
            alternatives={
                "matmul, confidence": lambda hidden=hidden, head=head: confidence(hidden @ head.T, 0.8),
                "matmul, softmax, max": lambda hidden=hidden, head=head: (hidden @ head.T / 0.8).softmax(-1).max(-1),
            },
        )


def focus(size: Size, ceiling: dict[str, float]) -> Iterator[Case]:
    """FOCUS's share of a step: importance in two layers. Its floor is 2 % of the step."""
    from dsim.kernels.focus_importance import focus_importance

    batch, block, masked_share, device = size.batch, 32, 24, size.device
    num_rows = batch * block
    (num_heads, num_kv_heads), d = size.heads, size.head_dim
    q = torch.randn(num_rows, num_heads, d, device=device).bfloat16()
    k = torch.randn(num_rows, num_kv_heads, d, device=device).bfloat16()
    masked = torch.cat([torch.arange(8, 8 + masked_share) + i * block for i in range(batch)]).to(device)
    masked_start = int32([masked_share * i for i in range(batch + 1)], device)

    def run() -> Any:
        return [focus_importance(q, k, masked, masked_start) for _ in range(2)]

    def right(found: Any) -> bool:
        importance = specification(focus_importance)(q, k, masked, masked_start)
        return all(torch.allclose(own, importance, rtol=1e-4, atol=0) for own in found)

    step = max(2 * NUM_PARAMETERS / ceiling["copy_bandwidth"], 2 * NUM_PARAMETERS * num_rows / ceiling["matmul_rate"])
    yield Case("focus", f"batch {batch}, block {block}", run, right, floor=0.02 * step, target=1.0)


def experts(size: Size, _: dict[str, float]) -> Iterator[Case]:
    """A layer's experts, even, and skewed by i to the power -0.8."""
    from dsim.kernels.grouped_experts import grouped_experts
    from dsim.kernels.grouped_experts import grouped_experts_kernel as kernel

    for name, width, ffn, num, top_k, activation in size.experts:
        gate_up = (torch.randn(num, 2 * ffn, width, device=size.device) / width**0.5).bfloat16()
        down = (torch.randn(num, width, ffn, device=size.device) / ffn**0.5).bfloat16()
        law = torch.arange(1, num + 1, device=size.device) ** -0.8
        for rows, even in [*((rows, True) for rows in size.expert_rows), (size.expert_rows[-1] // 4, False)]:
            x = torch.randn(rows, width, device=size.device).bfloat16()
            chosen = torch.multinomial((law**0 if even else law).expand(rows, -1), top_k)
            weights = torch.rand(rows, top_k, device=size.device)
            given = (x, chosen, weights, gate_up, down, activation)
            counts = chosen.flatten().bincount(minlength=num)
            reached = int((counts > 0).sum())

            def right(found: torch.Tensor, given: Any = given) -> bool:
                expected = specification(grouped_experts)(*given).float()
                # Six roundings to bf16, which truncate in the interpreter.
                return bool((found.float() - expected).abs().max() <= 2**-5 * expected.abs().max())

            yield Case(
                "grouped_experts",
                f"{name}, {rows} rows{'' if even else ' skewed'}, {reached} of {num}, most {int(counts.max())}",
                lambda given=given: grouped_experts(*given),
                right,
                num_bytes=2.0 * (3 * reached * width * ffn + 2 * rows * width),
                flops=6.0 * rows * top_k * width * ffn,
                alternatives={"loop of matmuls": loop_of_matmuls(given, counts.tolist())},
                candidates={
                    str(tile): lambda given=given, tile=tile: kernel.grouped_experts(*given, tile=tile)
                    for tile in ways(kernel.tile_for(x, rows * top_k, num))
                },
            )


def loop_of_matmuls(given: Any, counts: list[int]) -> Callable[[], torch.Tensor]:
    """By expert, with known numbers of rows, which no step knows."""
    x, chosen, weights, gate_up, down, activation = given
    order = chosen.flatten().argsort(stable=True)
    opened = {"silu": F.silu, "gelu": lambda gate: F.gelu(gate, approximate="tanh")}[activation]
    rows, of_rows = (order // chosen.shape[1]).split(counts), weights.flatten()[order].split(counts)

    def loop() -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, (row, weight) in enumerate(zip(rows, of_rows, strict=True)):
            if len(row):
                gate, up = (x[row] @ gate_up[expert].T).chunk(2, dim=1)
                out.index_add_(0, row, ((opened(gate) * up) @ down[expert].T).float() * weight[:, None])
        return out.to(x.dtype)

    return loop


def canvases(size: Size, _: dict[str, float]) -> Iterator[Case]:
    """A canvas step: attention, reading of logits."""
    from dsim.kernels.ragged_paged_attention import WHOLE, Sequences, ragged_paged_attention
    from dsim.kernels.ragged_paged_attention import ragged_paged_attention_kernel as kernel
    from dsim.kernels.read_logits import read_logits

    device, (length, _width, vocabulary), page = size.device, size.canvas, 64
    for batch in (1, 8):
        for num_heads, num_kv_heads, d, window in size.wide:
            num_keys = size.contexts[-1] // 4 + length
            held = -(-num_keys // page)
            k_pages, v_pages = (
                torch.randn(batch * held, page, num_kv_heads, d, device=device).bfloat16() for _ in range(2)
            )
            q = torch.randn(batch * length, num_heads, d, device=device).bfloat16()
            table = int32(torch.randperm(batch * held).view(batch, held), device)
            context = num_keys - length
            sequences = Sequences(
                table,
                int32([length * i for i in range(batch + 1)], device),
                int32(torch.arange(context, num_keys).repeat(batch), device),
                int32([context] * batch, device),
                listed=torch.ones(batch, length, dtype=torch.bool, device=device),
                block_length=WHOLE,
            )
            given = (q, k_pages, v_pages, sequences, window, d**-0.5)
            seen = min(num_keys, length + window - 1) if window else num_keys
            dense_k, dense_v = (
                pages[table.long()].flatten(1, 2)[:, num_keys - seen : num_keys].transpose(1, 2).contiguous()
                for pages in (k_pages, v_pages)
            )
            dense_q = q.view(batch, length, num_heads, d).transpose(1, 2).contiguous()
            largest = float(v_pages.abs().max())

            def right(found: torch.Tensor, given: Any = given, largest: float = largest) -> bool:
                expected = specification(ragged_paged_attention)(*given)
                return float((found.float() - expected.float()).abs().max()) <= 2**-7 * largest

            yield Case(
                "ragged_paged_attention", f"{batch} canvases, {num_heads}:{num_kv_heads}x{d}, keys {seen}",
                lambda given=given: ragged_paged_attention(*given), right,
                num_bytes=2.0 * (2 * q.numel() + 2 * batch * seen * num_kv_heads * d),
                flops=4.0 * num_heads * d * batch * length * seen,
                alternatives={
                    "sdpa": lambda a=(dense_q, dense_k, dense_v): F.scaled_dot_product_attention(*a, enable_gqa=True)
                },
                candidates={
                    str(tile): lambda given=given, tile=tile: kernel.ragged_paged_attention(*given, tile=tile)
                    for tile in ways(kernel.tile_for(kernel.rows_of_a_tile(q, batch, num_kv_heads), q))
                },
            )  # fmt: skip
        rows = batch * length
        logits = 4 * torch.randn(rows, vocabulary, device=device).bfloat16()
        about = (torch.ones(rows, device=device), torch.rand(rows, device=device), 30.0)
        written = logits.clone()

        def reads_right(found: Any, logits: Any = logits, about: Any = about, written: Any = written) -> bool:
            expected = logits.clone()
            drawn, likeliest, entropy = specification(read_logits)(expected, *about)
            agree = [(a == b).float().mean() >= 0.98 for a, b in zip(found, (drawn, likeliest), strict=False)]
            close = torch.allclose(found[2], entropy, rtol=1e-3, atol=1e-3)
            return all(agree) and close and torch.allclose(written, expected, rtol=2**-6, atol=1e-6)

        yield Case(
            "read_logits", f"{rows} rows of {vocabulary}",
            lambda written=written, about=about: read_logits(written, *about), reads_right,
            num_bytes=2.0 * 2 * logits.numel(),
            alternatives={} if batch > 1 else {
                "pytorch": lambda logits=logits, about=about: specification(read_logits)(logits.clone(), *about)
            },
        )  # fmt: skip


def products(size: Size, _: dict[str, float]) -> Iterator[Case]:
    """A dense layer's products and the head, by the library."""
    width, heads = size.hidden, size.heads[0] + 2 * size.heads[1]
    matrices = {
        "qkv": (width, heads * size.head_dim), "output": (size.heads[0] * size.head_dim, width),
        "gate_up": (width, 6 * width), "down": (3 * width, width), "head": (width, size.vocabulary),
    }  # fmt: skip
    for rows in (size.batch // 2, 32 * size.batch):
        for name, (k, n) in matrices.items():
            x = torch.randn(rows, k, device=size.device).bfloat16()
            weight = (torch.randn(n, k, device=size.device) / k**0.5).bfloat16()
            yield Case(
                f"linear {name}", f"{rows} rows of {k} to {n}", lambda x=x, weight=weight: F.linear(x, weight),
                lambda found: bool(torch.isfinite(found).all()), num_bytes=2.0 * (weight.numel() + rows * (k + n)),
                flops=2.0 * rows * k * n, ours=False,
            )  # fmt: skip


def elementwise(size: Size, _: dict[str, float]) -> Iterator[Case]:
    """Between a layer's products, against PyTorch's steps."""
    from dsim.kernels.qk_norm_rope import Norms, Pages, Turns, qk_norm_rope

    (num_heads, num_kv_heads), d, device = size.heads, size.head_dim, size.device
    for num in (size.batch // 2, 32 * size.batch):
        weight = torch.rand(d, device=device).bfloat16()
        qkv = torch.randn(num, num_heads + 2 * num_kv_heads, d, device=device).bfloat16()
        angles = torch.randn(num, d // 2, device=device)
        turns = Turns(angles.cos().bfloat16(), angles.sin().bfloat16())
        keys, values = (torch.zeros(max(1, num // 16), 64, num_kv_heads, d, device=device).bfloat16() for _ in range(2))
        pages = Pages(keys, values, slots=torch.arange(num, device=device))
        heads = (qkv, num_heads, Norms(weight, weight, 1e-6), turns, pages)

        def right(found: Any, heads: Any = heads) -> bool:
            # PyTorch's steps round in between.
            return torch.allclose(found, specification(qk_norm_rope)(*heads), rtol=0.02, atol=0.02)

        yield Case(
            "qk_norm_rope", f"{num} tokens", lambda heads=heads: qk_norm_rope(*heads), right,
            num_bytes=4.0 * qkv.numel(),
            alternatives={"pytorch": lambda heads=heads: specification(qk_norm_rope)(*heads)},
        )  # fmt: skip


def full_sequence(size: Size, _: dict[str, float]) -> Iterator[Case]:
    """A layer's selections after a full pass, as in LLaDA: KV heads equal heads."""
    from dsim.kernels.pooled_topk_pack import Choice, pooled_topk_pack

    device, length, block, heads, d = size.device, size.length, 32, size.heads[0], size.head_dim
    v = torch.randn(length, heads, d, device=device).bfloat16()
    # Integers give exact scores: the sets must be equal.
    whole_q, whole_k = (torch.randint(-4, 5, (length, heads, d), device=device).bfloat16() for _ in range(2))
    num_kept = (length - block) // 2
    num_pages = -(-num_kept // 64)
    k_pages, v_pages = (torch.zeros(num_pages, 64, heads, d, device=device).bfloat16() for _ in range(2))
    pack = (whole_q[-block:].contiguous(), whole_k, v, k_pages, v_pages)
    starts = (int32([0, block], device), int32([0, length], device), int32([length - block], device))
    for shared in (True, False):
        choice = Choice(*starts, int32([num_kept], device), int32(torch.arange(num_pages)[None], device), 3, shared)
        yield Case(
            "pooled_topk_pack",
            f"{num_kept} of {length}, {'shared' if shared else 'per head'}",
            lambda choice=choice: pooled_topk_pack(*pack, choice),
            lambda found, choice=choice: torch.equal(found, specification(pooled_topk_pack)(*pack, choice)),
            num_bytes=2.0 * v.numel() * (1 + 2 * num_kept / length * 2),
        )


# Those whose kernels no device had run by 2026-11-29 come first.
GROUPS = {
    "focus": focus,
    "full_sequence": full_sequence,
    "elementwise": elementwise,
    "products": products,
    "canvases": canvases,
    "attention": attention,
    "experts": experts,
    "confidence": confidences,
}


def measured(case: Case, clock: Clock, ceiling: dict[str, float]) -> dict[str, Any]:
    """Whether a case is right, and if so how fast."""
    row: dict[str, Any] = {"name": case.name, "shape": case.shape, "target": case.target, "right": False}
    before, first = taken.copy(), len(clock.state.samples)
    try:
        row["right"] = case.right(case.run())
        paths = {path for _, path in taken - before}
        assert paths == ({"triton"} if case.ours else set()), f"{case.name} took {paths}"
        if not row["right"]:
            return row | {"error": "WRONG, not timed"}
        took = clock.seconds(case.run)
    except Exception as error:  # of a case, such as lack of memory
        return row | {"error": reason(error)}
    row["seconds"] = statistics.median(took)
    row["samples"] = took
    row["host_seconds"] = clock.host(case.run)
    floors = {"ceilings": case.floor or max(
        case.num_bytes / ceiling["copy_bandwidth"], case.flops / ceiling["matmul_rate"]
    )}  # fmt: skip
    row["of_ceilings"] = floors["ceilings"] / row["seconds"]
    row["alternatives"] = {}
    for name, run in case.alternatives.items():
        try:
            floors[name] = row["alternatives"][name] = statistics.median(clock.seconds(run))
        except Exception as error:  # it does not count
            row["alternatives"][name] = reason(error)
    # Of the faster: the ceilings, or another way.
    row["floor"] = min(floors, key=lambda name: floors[name])
    row["of_floor"] = floors[row["floor"]] / row["seconds"]
    row["bytes_per_second"] = case.num_bytes / row["seconds"]
    row["flops_per_second"] = case.flops / row["seconds"]
    row["state"] = clock.state.state(first)
    return row


def reason(error: Exception) -> str:
    """Kind and first line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def tuned(case: Case, clock: Clock) -> list[dict[str, Any]]:
    """Fastest first; a failing or wrong one last, without a time."""
    rows = []
    for i, (name, run) in enumerate(case.candidates.items()):
        row: dict[str, Any] = {"how": name, "launched": i == 0, "seconds": None}
        try:
            if case.right(run()):
                row["seconds"] = statistics.median(clock.seconds(run))
            else:
                row["error"] = "WRONG"
        except Exception as error:  # such as lack of memory
            row["error"] = reason(error)
        rows.append(row)
    return sorted(rows, key=lambda row: (row["seconds"] is None, row["seconds"]))


def line_of_a_candidate(row: dict[str, Any]) -> str:
    took = f"{row['seconds'] * 1e6:10.1f} us" if row["seconds"] is not None else row["error"]
    return f"    {row['how']:76} {took}{'  <- launched' if row['launched'] else ''}"


def line(row: dict[str, Any]) -> str:
    words = f"{row['name']:22} {row['shape']:56}"
    if "error" in row:
        return f"{words} {row['error']}"
    words += f"{row['seconds'] * 1e6:9.1f} us {row['of_ceilings']:5.2f}"
    others = {name: took for name, took in row["alternatives"].items() if isinstance(took, float)}
    if others:
        best = min(others, key=lambda name: others[name])
        words += f"  {best} {others[best] * 1e6:.1f} us ({others[best] / row['seconds']:.2f})"
    if row["target"] is not None:
        words += f", target {row['target']:.2f} {'met' if row['of_floor'] >= row['target'] else 'MISSED'}"
    return words


def provenance(device: str) -> dict[str, str]:
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__, "device": device, "driver": "none"}
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
            found["driver"] = done.stdout.split("\n")[0].strip()
        except (OSError, subprocess.SubprocessError):
            found["driver"] = "unknown"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the kernels against the device's ceilings.")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument(
        "--only", choices=GROUPS, nargs="+", default=list(GROUPS), help="groups of cases, in this order"
    )
    parser.add_argument("--seconds", type=float, default=100.0, help="no case begins after this time (default 100)")
    parser.add_argument("--flex", action="store_true", help="time also FlexAttention, which takes long to compile")
    parser.add_argument("--tune", action="store_true", help="time also the other ways to compile a kernel")
    parser.add_argument("--smoke", action="store_true", help="tiny cases under the interpreter")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        print(f"kernel_ceilings.py measures a CUDA device, and PyTorch {torch.__version__} finds none", file=sys.stderr)
        return 2
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    begin = time.monotonic()
    size = SMOKE if options.smoke else replace(FULL, flex=options.flex)
    torch.manual_seed(0)
    clock = Clock(size.device)
    ceiling = ceilings(size, clock)
    where = provenance(size.device)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(
        f"copy {ceiling['copy_bandwidth'] / 1e9:,.0f} GB/s, bf16 product {ceiling['matmul_rate'] / 1e12:,.0f} TFLOP/s\n"
        "us: median; then the share of the floor by these two; the fastest alternative (its time over the kernel's)"
    )
    rows: list[dict[str, Any]] = []
    left: list[str] = []

    def report() -> None:
        """After every case: the run may be cut short."""
        found = {
            "schema": 1, "smoke": options.smoke, **where, "repeats": REPEATS, "ceilings": ceiling,
            "state": clock.state.quantities(), "seconds": time.monotonic() - begin, "left": left, "cases": rows,
        }  # fmt: skip
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    with use("triton"):
        for name in options.only:
            try:
                for case in GROUPS[name](size, ceiling):
                    if time.monotonic() - begin > options.seconds:
                        left.append(name)
                        break
                    rows.append(measured(case, clock, ceiling))
                    print(line(rows[-1]), flush=True)
                    if options.tune and "error" not in rows[-1]:
                        rows[-1]["candidates"] = tuned(case, clock)
                        for row in rows[-1]["candidates"]:
                            print(line_of_a_candidate(row), flush=True)
                    report()
            except Exception as error:  # of a group's inputs
                rows.append({"name": name, "shape": "", "right": False, "error": reason(error)})
                print(line(rows[-1]), flush=True)
    report()
    if str(clock.state):
        print(f"while kernels ran: {clock.state}")
    if left:
        print(f"--seconds {options.seconds:g} left out cases of {', '.join(left)}")
    if options.json:
        print(f"Wrote {options.json}")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
