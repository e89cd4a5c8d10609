"""DiffusionGemma's denoising step against the device's floor: `python benchmarks/canvas_step.py [--json FILE]`

Random weights of the published dimensions; steps of 8, 4 and 1 canvases after 1,024 tokens, captured and eager. A
part's floor is the longer of reading its weights and keys and multiplying its products, at the copy bandwidth and
matrix rate of the same run; only experts that evenly routed rows reach count; the head reads the embedding twice. Then
ways to multiply and attend are compared, while time lasts. A CPU runs a tiny model: only a trial of the script.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from dsim.benchmarks.breakdown import PRODUCTS, events_of
from dsim.benchmarks.step_floors import Watch, longer, rates
from dsim.kernels.grouped_experts import grouped_experts
from dsim.kernels.ragged_paged_attention import WHOLE, Sequences
from dsim.live.canvas_forward import CanvasCache, Turn
from dsim.live.canvas_graphs import GraphCanvasCache
from dsim.live.canvas_model import CanvasConfig, CanvasModel, num_params, random_canvas_model
from dsim.live.config import Settings
from dsim.live.shipped_configs import CONFIGS
from dsim.live.weights import origin as weights_origin
from dsim.live.weights import source_of
from dsim.profiler.measure import describe, settings_of

CANVASES = (8, 4, 1)
CONTEXT = 1024
PAGE = 64
REPEATS = 10
CANVASES_ON_A_CPU, REPEATS_ON_A_CPU = (2, 1), 3
SECONDS = 60.0
EXPERTS = ("_sort", "_gate_up", "_down", "_combine")


def tiny(folder: Path) -> str:
    """A config.json for a CPU."""
    config = dict(CONFIGS["diffusiongemma"])
    config["text_config"] = {
        **config["text_config"], "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 6, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 32, "vocab_size": 1000,
        "num_global_key_value_heads": 1, "sliding_window": 64, "num_experts": 8, "top_k_experts": 2,
        "moe_intermediate_size": 32,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | {"canvas_length": 16}))
    return str(folder)


def floors(config: CanvasConfig, canvases: int, context: int, size: int, bandwidth: float, rate: float) -> Any:
    """Least s of each part. size: bytes a number."""
    rows, hidden, layers = canvases * config.canvas_length, config.hidden, len(config.layers)
    expert = 3 * hidden * config.expert_ffn
    reached = config.num_experts * (1 - (1 - config.top_k / config.num_experts) ** rows)
    embedding = config.vocab * hidden
    dense = num_params(config) - embedding - layers * config.num_experts * expert
    read = products = 0.0
    for layer in config.layers:
        keys = (
            config.canvas_length + min(context, config.window - 1) if layer.sliding else config.canvas_length + context
        )
        read += 2 * keys * layer.kv_heads * layer.head_dim * canvases
        products += 4 * rows * keys * config.heads * layer.head_dim
    parts = {
        "attention": (size * read, products),
        "experts": (size * layers * expert * reached, 2.0 * rows * layers * expert * config.top_k),
        "dense": (size * dense, 2.0 * rows * dense),
        "head": (2 * size * embedding, 4.0 * rows * embedding),
    }
    return longer(parts, bandwidth, rate)


def turns_of(config: CanvasConfig, canvases: int) -> dict[int, Turn]:
    chance, length = np.random.default_rng(canvases), config.canvas_length
    return {
        slot: Turn(0.6, chance.random(length), chance.integers(0, config.vocab, length)) for slot in range(canvases)
    }


def latencies(cache: CanvasCache, turns: dict[int, Turn]) -> list[float]:
    """s until the answer."""
    taken = []
    for _ in range(REPEATS if torch.cuda.is_available() else REPEATS_ON_A_CPU):
        begin = time.perf_counter()
        cache.denoise(turns)
        taken.append(time.perf_counter() - begin)
    return taken[1:]


def parts_of(cache: CanvasCache, turns: dict[int, Turn]) -> tuple[dict[str, float], int]:
    """s by part, from its kernels in order; number of kernels."""
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True) as run:
        cache.denoise(turns)
        if cuda:
            torch.cuda.synchronize()
    seen = sorted(events_of(run, cuda), key=lambda event: event[1])
    last_layer = max((i for i, (name, *_) in enumerate(seen) if name == "_combine"), default=len(seen))
    found: dict[str, float] = {}
    for i, (name, _, _, took) in enumerate(seen):
        product = bool(PRODUCTS.search(name))
        if name == "_attend":
            part = "attention"
        elif name in EXPERTS:
            part = "experts"
        elif name in ("_sums", "_read"):
            part = "reading logits"
        elif i > last_layer:
            part = "head" if product else "settling"
        else:
            part = "dense" if product else "norms, gates and routing"
        found[part] = found.get(part, 0.0) + took
    if cuda and seen:
        busy = sum(took for *_, took in seen)
        found["gaps"] = max(0.0, max(end for _, _, end, _ in seen) - min(begin for _, begin, _, _ in seen) - busy)
    return found, len(seen)


def step_of(cache: CanvasCache, turns: dict[int, Turn]) -> dict[str, Any]:
    """Times, kernels, seconds by part."""
    for _ in range(2):
        cache.denoise(turns)
    samples = latencies(cache, turns)
    parts, launches = parts_of(cache, turns)
    busy = sum(took for part, took in parts.items() if part != "gaps")
    latency = statistics.median(samples)
    return {"latency": latency, "busy": busy, "launches": launches, "parts": parts, "samples": samples}


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:160]


def ways(model: CanvasModel, canvases: int) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Ways to compute a part: part, way, call."""
    config, device, dtype = model.config, model.embedding.device, model.embedding.dtype
    rows, cuda = canvases * config.canvas_length, device.type == "cuda"
    x = torch.randn(rows, config.hidden, device=device).to(dtype)
    chosen = torch.rand(rows, config.num_experts, device=device).topk(config.top_k, dim=-1).indices
    shares = torch.full(chosen.shape, 1 / config.top_k, device=device)
    yield f"experts, {rows} rows", "ours", lambda: grouped_experts(x, chosen, shares, *model.experts(), "gelu")
    soft = torch.rand(rows, config.vocab, device=device, dtype=dtype)
    yield f"signal, {rows} rows", "one product", lambda: soft @ model.embedding

    def split(num: int) -> torch.Tensor:
        parts = soft.view(rows, num, -1).transpose(0, 1), model.embedding.view(num, -1, config.hidden)
        return torch.bmm(*parts).sum(0)

    for num in (4, 8):
        yield f"signal, {rows} rows", f"{num} products", lambda num=num: split(num)
    if not cuda:
        return
    from dsim.benchmarks.kernel_ceilings import ways
    from dsim.kernels.grouped_experts import grouped_experts_kernel as experts
    from dsim.kernels.ragged_paged_attention import ragged_paged_attention_kernel as kernel

    for tile in [experts.TILES[tall] for tall in (32, 64, 128)]:
        yield f"experts, {rows} rows", f"ours, {tuple(tile)}", lambda tile=tile: experts.grouped_experts(
            x, chosen, shares, *model.experts(), "gelu", tile
        )  # fmt: skip
    keys = CONTEXT + config.canvas_length
    pages = -(-keys // PAGE)
    table = torch.arange(canvases * pages, dtype=torch.int32, device=device).view(canvases, pages)
    starts = torch.arange(canvases + 1, dtype=torch.int32, device=device) * config.canvas_length
    positions = torch.arange(CONTEXT, keys, dtype=torch.int32, device=device).repeat(canvases)
    history = torch.full((canvases,), CONTEXT, dtype=torch.int32, device=device)
    listed = torch.ones(canvases, config.canvas_length, dtype=torch.bool, device=device)
    sequences = Sequences(table, starts, positions, history, listed=listed, block_length=WHOLE)
    for layer in {(layer.sliding, layer.kv_heads, layer.head_dim): layer for layer in config.layers}.values():
        q = torch.randn(rows, config.heads, layer.head_dim, device=device).to(dtype)
        cached = torch.randn(2, canvases * pages, PAGE, layer.kv_heads, layer.head_dim, device=device).to(dtype)
        window = config.window if layer.sliding else 0
        for tile in ways(kernel.tile_for(kernel.rows_of_a_tile(q, canvases, layer.kv_heads), q)):
            yield (
                f"attention, heads of {layer.head_dim}, {rows} rows", str(tuple(tile)),
                lambda q=q, cached=cached, window=window, tile=tile: kernel.ragged_paged_attention(
                    q, cached[0], cached[1], sequences, window, 1.0, tile=tile
                ),
            )  # fmt: skip


def seconds(work: Callable[[], Any]) -> list[float]:
    """Of calls, on CUDA enqueued together."""
    work()
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        work()
        return [time.perf_counter() - begin]
    taken = []
    for _ in range(8):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        taken.append(first.elapsed_time(last) / 1e3)
    return taken


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="A denoising step compared with the device's floor")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no part begins later than this")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    watch, cuda, random = Watch(given.seconds), torch.cuda.is_available(), Settings(random_weights=True)
    device = "cuda" if cuda else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        name = "diffusiongemma" if cuda else tiny(Path(folder))
        source = source_of(name, random)
        dtype = torch.bfloat16 if cuda else torch.float32
        model = random_canvas_model(source, device, dtype, 0, random)
    config, about = model.config, describe(device)
    made = weights_origin(0, trained=False, has_experts=True)
    size = model.embedding.element_size()
    if cuda:
        torch.cuda.synchronize()
    print(f"{about.name}: {config.name}, weights made after {time.monotonic() - watch.begin:.0f} s")
    bandwidth, rate = rates(device)
    print(f"copy {bandwidth / 1e9:.0f} GB/s, matrix product {rate / 1e12:.2f} TFLOP/s")
    most, *_ = sizes = CANVASES if cuda else CANVASES_ON_A_CPU
    context, longest = (CONTEXT, CONTEXT + 2 * config.canvas_length) if cuda else (100, 132)
    found: dict[str, Any] = {
        "schema": 1, "device": about.name, "bandwidth": bandwidth, "rate": rate,
        **settings_of(about, config.name, model.embedding, cuda, made),
        "context": context, "steps": [], "parts": [], "ways": [],
    }  # fmt: skip

    def keep() -> None:
        if given.json is not None:  # the run may be cut short
            given.json.write_text(json.dumps(found, indent=1) + "\n")

    pages = most * -(-longest // PAGE)
    where = (pages, pages), PAGE, str(model.embedding.device), model.embedding.dtype
    graphs = GraphCanvasCache(model, *where, longest=longest)
    chance = np.random.default_rng(0)
    texts = {
        slot: torch.from_numpy(chance.integers(0, config.vocab, context)).to(model.embedding.device)
        for slot in range(most)
    }
    for again in (False, True):
        graphs.clear()
        begin = time.perf_counter()
        graphs.encode(texts)
        if cuda:
            torch.cuda.synchronize()
        found["encode"] = time.perf_counter() - begin
        if again:
            print(f"encoding {most} x {context} tokens: {1e3 * found['encode']:.1f} ms")
    for slot in texts:
        graphs.begin(slot, chance.integers(0, config.vocab, config.canvas_length))
    for mode in ("captured", "eager"):
        graphs.max_canvases = most if mode == "captured" else 0
        for canvases in sizes:
            if watch.late(f"{mode} {canvases} x {config.canvas_length}"):
                continue
            try:
                row = step_of(graphs, turns_of(config, canvases))
            except Exception as error:  # time the other steps
                print(f"{mode:>8} {canvases} x {config.canvas_length} failed: {first_line(error)}")
                continue
            parts, least = row.pop("parts"), floors(config, canvases, context, size, bandwidth, rate)
            total = sum(least.values())
            row = {"mode": mode, "canvases": canvases, **row, "floor": total, "ratio": row["latency"] / total}
            found["steps"].append(row)
            found["parts"].append({"mode": mode, "canvases": canvases, "seconds": parts, "floors": least})
            print(
                f"{mode:>8} {canvases} x {config.canvas_length}: {1e3 * row['latency']:7.2f} ms, kernels "
                f"{1e3 * row['busy']:7.2f} ms, floor {1e3 * total:6.2f} ms: {row['ratio']:5.2f} times, "
                f"{row['launches']} launches"
            )
            for part, took in sorted(parts.items(), key=lambda item: -item[1]):
                floor = f", floor {1e3 * least[part]:6.2f} ms" if part in least else ""
                print(f"           {part:18} {1e3 * took:7.2f} ms{floor}")
            keep()
    for canvases in (sizes[0], sizes[-1]):
        for part, way, work in ways(model, canvases):
            if watch.late(f"{part}: {way}"):
                continue
            try:
                samples = seconds(work)
                took = statistics.median(samples)
            except Exception as error:  # compare the other ways
                print(f"{part}: {way} failed: {first_line(error)}")
                continue
            found["ways"].append({"part": part, "way": way, "seconds": took, "samples": samples})
            print(f"{part}: {way} {1e6 * took:.0f} us")
            keep()
    keep()
    watch.print()


if __name__ == "__main__":
    main()
