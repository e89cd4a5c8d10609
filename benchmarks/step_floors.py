"""A decode step of the live executor against the device's floor: `python benchmarks/step_floors.py [--model sdar-8b]`.

The floor is the sum of its parts': attention, experts, the other layers and the head, each the longer of reading its
weights and keys and multiplying its products, at the copy bandwidth and matrix rate of the same run. Steps run captured
and eagerly. The last lines give the gain of a quarter of the tokens at batch 128: planned so, and as FOCUS leaves them,
with the share of choosing. A CPU runs the tiny model with a sixteenth of the sequences: only a trial of the script.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsim.benchmarks.step_shapes import Shape, measure, pages_of
from dsim.engine.policies.focus import Focus
from dsim.live import evicting
from dsim.live.cache import PagedCache
from dsim.live.config import ModelConfig, named
from dsim.live.evicting import Evict
from dsim.live.forward import Batch, Forward
from dsim.live.graphs import GraphForward
from dsim.profiler.measure import Loaded, LoadedCanvas, open_any

REPEATS = 14
CONTEXT = 512
SECONDS = 120.0
# Allowed multiple of the floor; none of one sequence, where production engines exceed 1.3 as well.
SHAPES = {
    Shape(1, 32, CONTEXT): None,
    Shape(16, 32, CONTEXT): 1.3,
    Shape(64, 32, CONTEXT): 1.3,
    Shape(256, 32, CONTEXT): 1 / 0.7,
}
PREFILLS = (Shape(1, 0, 64), Shape(1, 0, CONTEXT))
EVICTION = (Shape(128, 32, CONTEXT), Shape(128, 8, CONTEXT))
LEAST_GAIN = 2.5
CHOOSING = {64: 0.02, 128: None}  # evicting sequences -> largest share of choosing


def rates(device: str) -> tuple[float, float]:
    """Bytes/s of a copy (read and written), FLOP/s of a product: medians."""
    n, num = (8192, 2**30) if device == "cuda" else (512, 2**22)
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    source, target = (torch.zeros(num, dtype=torch.int8, device=device) for _ in range(2))
    a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
    return 2 * num / seconds(lambda: target.copy_(source)), 2 * n**3 / seconds(lambda: a @ b)


def seconds(work: Any) -> float:
    """Median of calls, each waited for."""
    taken = []
    for _ in range(20):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[5:])


class Watch:
    """The time of a script: cases that do not begin in it are left out, and named."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begin, self.left = seconds, time.monotonic(), list[str]()

    def late(self, case: str) -> bool:
        if time.monotonic() - self.begin <= self.seconds:
            return False
        self.left.append(case)
        return True

    def print(self) -> None:
        if self.left:
            print(f"--seconds {self.seconds:g} left out {', '.join(self.left)}", flush=True)


def longer(parts: Mapping[str, tuple[float, float]], bandwidth: float, rate: float) -> dict[str, float]:
    """Least s of each part of a step, of the bytes that it reads and the operations that it computes."""
    return {name: max(read / bandwidth, flops / rate) for name, (read, flops) in parts.items()}


def floors(config: ModelConfig, shape: Shape, size: float, bandwidth: float, rate: float) -> dict[str, float]:
    """Least s of a step's parts. size: bytes a weight; keys have 2.

    Only experts that evenly routed tokens reach are read; each token is multiplied by its own.
    """
    head = embedding = config.vocab * config.hidden
    dense = config.num_params - (head if config.tied else head + embedding)  # the embedding is looked up
    reached = multiplied = 0.0  # weights of experts
    if config.experts is not None:
        mixed = config.experts
        one = 3 * config.hidden * mixed.ffn * (config.layers - mixed.dense_layers)
        dense -= one * mixed.num
        reached = one * mixed.num * (1 - (1 - mixed.top_k / mixed.num) ** shape.tokens)
        multiplied = one * mixed.top_k
    # A prompt's tokens see half of it on average; only its last block passes the head.
    keys = shape.context + shape.window
    pairs = shape.tokens * (keys if shape.window else keys // 2)
    rows = shape.tokens if shape.window else config.block_length * shape.batch
    parts = {
        "attention": (
            2 * shape.batch * keys * config.kv_elements,
            4.0 * config.layers * config.heads * config.head_dim * pairs,
        ),
        "experts": (size * reached, 2.0 * multiplied * shape.tokens),
        "dense": (size * dense, 2.0 * dense * shape.tokens),
        "head": (size * head, 2.0 * head * rows),
    }
    return longer(parts, bandwidth, rate)


def floor(loaded: Loaded, shape: Shape, bandwidth: float, rate: float) -> float:
    """Least s of a step."""
    config = loaded.model.config
    size = loaded.memory.weight_bytes / config.num_params
    return sum(floors(config, shape, size, bandwidth, rate).values())


def words(shape: Shape) -> str:
    return f"{shape.batch:>4} x {shape.window:<3}" if shape.window else f"prefill of {shape.context} tokens"


def evicting_step(forward: Forward, num: int, context: int, block: int) -> Batch:
    """A block of masks each, of which a quarter is retained whatever FOCUS chooses."""
    cache = forward.cache
    slots = np.arange(num, dtype=np.int32)
    cache.reserve(slots, np.full(num, context + block))
    row, column = np.divmod(np.arange(num * block), block)
    history, starts = np.full(num, context), np.arange(num + 1) * block
    return Batch(
        tokens=np.full(len(row), forward.model.config.mask_token), positions=context + column,
        places=cache.places(slots[row], context + column), query_start=starts,
        page_table=cache.tables(slots, history + block), history=history, listed=np.ones((num, block), np.bool_),
        block_length=block, sampled=np.arange(len(row)),
        evict=Evict(Focus(), np.arange(len(row)), starts, lambda growth: column < block // 4),
    )  # fmt: skip


@contextmanager
def timed(names: tuple[str, ...]) -> Iterator[Callable[[], float]]:
    """Time calls of these functions of dsim.live.evicting; yields a function: s since its last call.

    On CUDA between events on the stream, so that waiting for the host counts.
    """
    cuda = torch.cuda.is_available()
    taken: list[tuple[Any, Any]] = []

    def now() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wrap(work: Any) -> Any:
        def timed_work(*given: Any, **options: Any) -> Any:
            begin = now()
            out = work(*given, **options)
            taken.append((begin, now()))
            return out

        return timed_work

    def told() -> float:
        if cuda:
            torch.cuda.synchronize()
        spent = sum(a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in taken)
        taken.clear()
        return spent

    plain = {name: getattr(evicting, name) for name in names}
    try:
        for name, work in plain.items():
            setattr(evicting, name, wrap(work))
        yield told
    finally:
        for name, work in plain.items():
            setattr(evicting, name, work)


def focus_steps(forward: Forward, num: int, context: int, block: int) -> dict[str, list[float]]:
    """s of whole steps, of steps that evict three quarters, and of their choosing."""
    step = evicting_step(forward, num, context, block)
    # A graph allows no timing inside.
    names = () if isinstance(forward, GraphForward) else ("focus_importance", "keep")
    with timed(names) as told:
        found: dict[str, list[float]] = {"whole": [], "evicting": [], "choosing": []}
        for _ in range(REPEATS):
            for name, batch in (("whole", replace(step, evict=None)), ("evicting", step)):
                begin = time.perf_counter()
                forward.run(batch)
                found[name].append(time.perf_counter() - begin)
            found["choosing"].append(told())
    forward.cache.clear()
    return {name: values[2:] for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="A decode step beside the device's floor")
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
    config = loaded.model.config
    device = "cuda" if loaded.on_gpu else "cpu"
    context = min(CONTEXT, config.context_limit - 3 * config.block_length) // config.block_length * config.block_length
    bandwidth, rate = rates(device)
    print(f"{loaded.device.name}: copy {bandwidth / 1e9:.0f} GB/s, matrix product {rate / 1e12:.2f} TFLOP/s")
    scale = 1 if loaded.on_gpu else 16  # a CPU only tries the script
    pages = 256 // scale * pages_of(context, config.block_length, 64)
    weight = loaded.model.embedding.weight
    about = {"device": loaded.device.name, "bandwidth": bandwidth, "rate": rate, **loaded.settings}
    rows: list[dict[str, Any]] = []

    def add(**row: Any) -> None:
        """Written at once: the run may be cut short."""
        rows.append(row)
        if given.json is not None:
            given.json.write_text(json.dumps({**about, "steps": rows}, indent=1) + "\n")

    def timed_step(forward: Forward, mode: str, shape: Shape, most: float | None) -> float:
        """Median latency, s."""
        found = measure(forward, shape, config.block_length, REPEATS)
        latency, within = statistics.median(found.latency), statistics.median(found.device)
        least = floor(loaded, shape, bandwidth, rate)
        add(
            mode=mode, batch=shape.batch, window=shape.window, context=shape.context, latency=latency, device=within,
            floor=least, ratio=within / least, most=most, samples=[found.latency.tolist(), found.device.tolist()],
        )  # fmt: skip
        asked = "" if most is None else f", asked at most {most:.2f}"
        print(
            f"{mode:>7} {words(shape)} {1e3 * latency:8.2f} ms, device {1e3 * within:8.2f} ms, "
            f"floor {1e3 * least:7.2f} ms: {within / least:5.2f} times{asked}",
            flush=True,
        )
        return latency

    for kind in (GraphForward, Forward) if loaded.on_gpu else (Forward,):
        forward = kind(loaded.model, PagedCache(config, pages, 64, device, weight.dtype))
        name = "graphs" if kind is GraphForward else "eager"
        took = {}
        for shape, most in [*SHAPES.items(), *((s, None) for s in (*EVICTION, *PREFILLS))]:
            actual = Shape(
                max(1, shape.batch // scale), min(shape.window, config.block_length), min(shape.context, context)
            )
            if not watch.late(f"{name} {words(actual).strip()}"):
                took[shape] = timed_step(forward, name, actual, most)
        if took.keys() >= {*EVICTION}:
            gain = took[EVICTION[0]] / took[EVICTION[1]]
            print(
                f"{name:>7} a quarter of the tokens at batch 128: {gain:.2f} times the steps, "
                f"asked {LEAST_GAIN} or more"
            )
        for num, most in CHOOSING.items():
            if watch.late(f"{name} FOCUS at batch {num // scale}"):
                continue
            samples = focus_steps(forward, num // scale, context, config.block_length)
            evicting = {part: statistics.median(values) for part, values in samples.items()}
            gain = evicting["whole"] / evicting["evicting"]
            share = evicting["choosing"] / evicting["evicting"] if kind is Forward else None
            add(mode=name, batch=num // scale, context=context, **evicting, gain=gain, share=share, samples=samples)
            asked = "" if most is None else f", asked at most {most:.0%}"
            wanted = f", asked {LEAST_GAIN} or more" if num == EVICTION[0].batch else ""
            print(
                f"{name:>7} FOCUS leaves a quarter at batch {num // scale}: {1e3 * evicting['evicting']:.2f} ms for "
                f"{1e3 * evicting['whole']:.2f} ms, {gain:.2f} times the steps{wanted}"
                + (f"; choosing takes {share:.1%}{asked}" if share is not None else ""),
                flush=True,
            )
        del forward
    watch.print()


if __name__ == "__main__":
    main()
