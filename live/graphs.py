"""A forward whose decode steps are captured CUDA graphs, one a padded shape: launching them costs next to nothing.

Prefill, whose shape is never the same twice, stays eager, and so does a step that evicts: its shape shows half-way.
Where there is no CUDA the padded batch is computed eagerly: slower, and the same numbers, which is how the padding is
tested.
"""

import time

import numpy as np
import torch
from torch import Tensor

from ..engine.latency import bucket
from .cache import PagedCache
from .evicting import Array
from .forward import Batch, Forward, Sampled
from .model import Decoder
from .padding import pad, shape_of

MAX_ROWS = 8192  # of a captured step


class GraphForward(Forward):
    """Runs decode batches by replaying graphs; a shape is captured when it is first seen, or by `prepare`."""

    def __init__(self, model: Decoder, cache: PagedCache, temperature: float = 1.0, max_num_logits: int = 8192) -> None:
        super().__init__(model, cache, temperature, max_num_logits)
        # By the shapes of a batch's arrays: the graph, where its inputs lie, and where its answer comes.
        self._graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def run(self, batch: Batch) -> Sampled:
        """Compute a batch, its keys and values written to the cache."""
        num_rows = len(batch.tokens)
        varies = batch.prefill or batch.evict is not None
        if varies or len(batch.sampled) != num_rows or num_rows > MAX_ROWS:
            return super().run(batch)
        rows, sequences = shape_of(batch)
        page, limit = self.cache.page_size, self.model.config.context_limit
        # One width for all: a graph's launches follow from shapes, and a wider table costs nothing.
        pages = max(batch.page_table.shape[1], -(-limit // page))
        padded = pad(batch, rows, sequences, pages, batch.listed.shape[1])
        if self.device.type != "cuda":
            clock = time.perf_counter()
            out = super().run(padded)
            return Sampled(out.tokens[:num_rows], out.confidence[:num_rows], time.perf_counter() - clock)
        return self._replay(padded, num_rows)

    def prepare(self, batches: list[int], windows: list[int], width: int, block_length: int) -> None:
        """Capture the shapes of so many sequences with such windows before the clock starts."""
        seen = set()
        for num in batches:
            for window in windows:
                rows = bucket(num * window)
                if rows <= MAX_ROWS and (rows, num) not in seen:
                    seen.add((rows, num))
                    self.run(_blank(num, window, width, block_length))

    @torch.inference_mode()
    def _replay(self, padded: Batch, num_rows: int) -> Sampled:
        flat, shapes = self._flatten(padded)
        key = (*(size for shape in shapes.values() for size in shape), padded.block_length)
        if key not in self._graphs:
            self._graphs[key] = self._capture(flat, shapes, padded.block_length)
        graph, held, answer = self._graphs[key]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        held.copy_(torch.from_numpy(flat).pin_memory(), non_blocking=True)
        begin.record()
        graph.replay()
        end.record()
        both = answer.cpu().numpy()
        device = begin.elapsed_time(end) / 1e3
        return Sampled(both[0, :num_rows].astype(np.int64), both[1, :num_rows].astype(np.float32), device)

    def _capture(
        self, flat: Array, shapes: dict[str, tuple[int, ...]], block_length: int
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Record a step of a shape: its inputs are read from one tensor, its answer [2, rows] written to another."""
        held = torch.from_numpy(flat).to(self.device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles and allocates outside the recording
                self._answer(held, shapes, block_length)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = self._answer(held, shapes, block_length)
        return graph, held, answer

    def _answer(self, held: Tensor, shapes: dict[str, tuple[int, ...]], block_length: int) -> Tensor:
        tokens, confidence = self._compute(self._unflatten(held, shapes), block_length)
        return torch.stack([tokens.to(torch.float64), confidence.to(torch.float64)])


def _blank(num: int, window: int, width: int, block_length: int) -> Batch:
    """A decode batch that writes nothing and sees nothing."""
    rows = num * window
    zeros = np.zeros(rows, np.int64)
    return Batch(
        tokens=zeros, positions=zeros, places=zeros - 1, query_start=np.arange(num + 1) * window,
        page_table=np.full((num, 1), -1, np.int32), history=np.zeros(num, np.int64),
        listed=np.zeros((num, width), np.bool_), block_length=block_length, sampled=np.arange(rows),
    )  # fmt: skip
