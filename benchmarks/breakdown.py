"""A replayed decode step, kernel by kernel: `python benchmarks/breakdown.py [--model sdar-8b] [--json FILE]`

Steps of whole blocks of 1, 16, 64 and 256 sequences, from captured graphs, under PyTorch's profiler. A kernel is ours
if kernels/*/*_kernel.py defines it; "gaps" is the time without a kernel. On a CPU, operators replace kernels: only a
trial of the script.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from dsim.benchmarks.step_floors import Watch, evicting_step, floor, rates
from dsim.benchmarks.step_shapes import Shape, pages_of
from dsim.live.cache import PagedCache
from dsim.live.config import named
from dsim.live.forward import Batch, Forward
from dsim.live.graphs import GraphForward
from dsim.profiler.measure import LoadedCanvas, open_any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 90.0
BATCHES = (256, 64, 16, 1)  # largest first: the others reuse its memory
CONTEXT = 512
REPLAYS = 5
WARM = 3
SHOWN = 10  # kernels of a step
PRODUCTS = re.compile(r"gemm|nvjet|cutlass|cublas|splitk|::mm|addmm|aten::linear", re.IGNORECASE)
ATTENTION = re.compile(r"flashinfer|flash_|Batch(Decode|Prefill)|attention", re.IGNORECASE)
COPIES = re.compile(r"^Mem(cpy|set)|copy", re.IGNORECASE)


def ours() -> frozenset[str]:
    """This project's kernels."""
    files = sorted((ROOT / "kernels").glob("*/*_kernel.py"))
    return frozenset(name for file in files for name in re.findall(r"^def (\w+)\(", file.read_text(), re.MULTILINE))


def kind(name: str, own: frozenset[str]) -> str:
    if name in own:
        return "ours"
    for found, pattern in (("products", PRODUCTS), ("attention", ATTENTION), ("copies", COPIES)):
        if pattern.search(name):
            return found
    return "PyTorch"


@dataclass(frozen=True)
class Kernel:
    name: str
    kind: str
    launches: float
    seconds: float


def whole_blocks(forward: Forward, num: int, context: int, block: int) -> Batch:
    """A block each after `context` keys."""
    return replace(evicting_step(forward, num, context, block), evict=None)


def events_of(run: Any, cuda: bool) -> Iterator[tuple[str, float, float, float]]:
    """Name, begin, end and own time (s) on the device; on a CPU, operators."""
    for event in run.events():
        if event.device_type == (DeviceType.CUDA if cuda else DeviceType.CPU):
            begin, end = event.time_range.start / 1e6, event.time_range.end / 1e6
            yield event.name, begin, end, end - begin if cuda else event.self_cpu_time_total / 1e6


def broken_down(forward: Forward, batch: Batch, own: frozenset[str]) -> tuple[list[Kernel], list[float], list[float]]:
    """Kernels, slowest first; each replay's wall time, and time from the first to the last (s)."""
    cuda = torch.cuda.is_available()
    for _ in range(WARM):
        forward.run(batch)
    walls = []
    for _ in range(REPLAYS):
        begin = time.perf_counter()
        forward.run(batch)
        walls.append(time.perf_counter() - begin)
    spans: list[float] = []
    found: dict[str, tuple[int, float]] = {}
    for _ in range(REPLAYS):
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True) as run:
            forward.run(batch)
            if cuda:
                torch.cuda.synchronize()
        seen = list(events_of(run, cuda))
        spans.append(max(end for _, _, end, _ in seen) - min(begin for _, begin, _, _ in seen))
        for name, _, _, took in seen:
            launches, seconds = found.get(name, (0, 0.0))
            found[name] = launches + 1, seconds + took
    kernels = [Kernel(n, kind(n, own), count / REPLAYS, took / REPLAYS) for n, (count, took) in found.items()]
    return sorted(kernels, key=lambda k: -k.seconds), walls, spans


def short(name: str) -> str:
    """Without a template's arguments."""
    plain = re.sub(r"<.*", "", name.removeprefix("void "))
    return plain if len(plain) <= 56 else plain[:53] + "..."


def main() -> None:
    parser = argparse.ArgumentParser(description="A replayed decode step, kernel by kernel")
    parser.add_argument("--model", help="by default tiny, or sdar-8b on a GPU, whose weights are random")
    parser.add_argument("--random-weights", metavar="CONFIG", help="as in dsim live")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no step begins later than this")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    watch = Watch(given.seconds)
    default = "sdar-8b" if torch.cuda.is_available() and given.random_weights is None else None
    name, settings = named(given.model or default, given.random_weights)
    loaded = open_any(name, settings=settings)
    if isinstance(loaded, LoadedCanvas):
        parser.error(f"model is {name}, expected one without canvases, which canvas_step.py measures")
    config, own = loaded.model.config, ours()
    block, weight = config.block_length, loaded.model.embedding.weight
    batches = BATCHES if loaded.on_gpu else (4, 1)
    context = min(CONTEXT, config.context_limit - 3 * block) // block * block
    bandwidth, rate = rates("cuda" if loaded.on_gpu else "cpu")
    pages = batches[0] * pages_of(context, block, 64)
    cache = PagedCache(config, pages, 64, str(weight.device), weight.dtype)
    cache.fill(0)
    forward: Forward = GraphForward(loaded.model, cache, longest=context + 3 * block) if loaded.on_gpu else Forward(
        loaded.model, cache
    )  # fmt: skip
    steps: list[dict[str, Any]] = []
    print(f"{loaded.device.name}: a step of {config.name}, whole blocks of {block} after {context} keys")
    for num in batches:
        if watch.late(f"{num} x {block}"):
            continue
        kernels, walls, spans = broken_down(forward, whole_blocks(forward, num, context, block), own)
        wall, span = statistics.median(walls), statistics.median(spans)
        cache.clear()
        busy = sum(k.seconds for k in kernels)
        kinds = {
            name: sum(k.seconds for k in kernels if k.kind == name) for name in dict.fromkeys(k.kind for k in kernels)
        }
        kinds["gaps"] = max(0.0, span - busy)
        least = floor(loaded, Shape(num, block, context), bandwidth, rate)
        steps.append({
            "batch": num, "window": block, "context": context, "wall": wall, "span": span, "floor": least,
            "launches": sum(k.launches for k in kernels), "kinds": kinds, "kernels": [vars(k) for k in kernels],
            "samples": [walls, spans],
        })  # fmt: skip
        print(
            f"{num:>4} x {block}: {1e3 * span:.2f} ms on the device, {1e3 * wall:.2f} ms in all, "
            f"floor {1e3 * least:.2f} ms, {steps[-1]['launches']:.0f} launches; "
            + ", ".join(f"{name} {1e3 * took:.2f} ms ({took / span:.0%})" for name, took in kinds.items())
        )
        for k in kernels[:SHOWN]:
            print(f"      {short(k.name):56} {k.kind:9} {k.launches:6.0f} x {1e6 * k.seconds / k.launches:8.1f} us"
                  f" {k.seconds / span:5.1%}")  # fmt: skip
        if given.json is not None:  # the run may be cut short
            about = {"schema": 1, "device": loaded.device.name, "bandwidth": bandwidth, "rate": rate, **loaded.settings}
            given.json.write_text(json.dumps(about | {"steps": steps}, indent=1) + "\n")
    watch.print()


if __name__ == "__main__":
    main()
