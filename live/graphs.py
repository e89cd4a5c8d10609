"""A forward whose layers are captured CUDA graphs, one a padded shape: launches cost almost nothing.

The head follows by itself: its few launches are hidden behind the layers. Small prefills are captured, too; others hide
their launches. An evicting step is two graphs, between which the host chooses the rows. Without CUDA a graph recomputes
into the same tensors, so that tests check padding, aliasing and choice.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..engine.policies.focus import Focus
from ..engine.spec import Policy
from . import evicting
from .cache import PagedCache
from .evicting import Evict, Floats, Half, Inputs, Retained
from .forward import Batch, DeviceClock, Forward, flattened, unflattened
from .model import Decoder
from .padding import (
    MAX_ROWS,
    blank,
    pad,
    pad_retained,
    padded_shape,
    prefill_shape,
    reachable,
    reachable_after,
    reachable_prefills,
)

Key = tuple[object, ...]
Launches = Callable[[], Tensor]
# Records launches; returns their repetition, and the answer.
Recorder = Callable[[Launches], tuple[Callable[[], object], Tensor]]


class CudaRecorder:
    """Captures graphs in one pool, largest first: smaller ones reuse its memory."""

    def __init__(self) -> None:
        # PyTorch cannot capture into a pool whose last graph is gone: this one keeps it.
        number = torch.zeros(1, device="cuda")
        self._first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._first):
            number += 1
        self._pool = self._first.pool()

    def __call__(self, compute: Launches) -> tuple[Callable[[], object], Tensor]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile and allocate first
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            answer = compute()
        return graph.replay, answer


def recompute(compute: Launches) -> tuple[Callable[[], object], Tensor]:
    """For devices without graphs."""
    answer = compute().clone()
    return lambda: answer.copy_(compute()), answer


class Captured(NamedTuple):
    replay: Callable[[], object]
    answer: Tensor


class Graphs:
    """Captured launches by key, and the inputs that all of them read."""

    def __init__(self, device: torch.device, record: Recorder | None = None) -> None:
        self.by_key: dict[Key, Captured] = {}
        self.num_captures = 0
        self.seconds = 0.0  # of captures
        self._record = record or (CudaRecorder() if device.type == "cuda" else recompute)
        self._numbers = torch.zeros(0, dtype=torch.int64, device=device)
        self._host = self._numbers.cpu()

    def make_room(self, size: int) -> None:
        """Room for `size` numbers; more than there was drops the graphs, which read the old tensor."""
        if size > len(self._numbers):
            self.by_key.clear()
            self._numbers = self._numbers.new_zeros(max(size, 2 * len(self._numbers)))
            self._host = torch.zeros(len(self._numbers), dtype=torch.int64, pin_memory=self._numbers.is_cuda)

    def bring(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy a graph's inputs to the device; the host has waited for the last copy's step."""
        flat, _ = flattened(arrays)
        self.make_room(len(flat))
        self._host[: len(flat)] = torch.from_numpy(flat)
        self._numbers[: len(flat)].copy_(self._host[: len(flat)], non_blocking=True)

    def captured(
        self, key: Key, arrays: Mapping[str, npt.NDArray[Any]], compute: Callable[[Inputs], Tensor]
    ) -> Captured:
        """The graph of a computation on inputs like `arrays`, recorded on first use; brings the arrays."""
        self.bring(arrays)
        if key not in self.by_key:
            shapes = {name: array.shape for name, array in arrays.items()}
            self.num_captures += 1
            begin = time.perf_counter()
            self.by_key[key] = Captured(*self._record(lambda: compute(unflattened(self._numbers, shapes))))
            self.seconds += time.perf_counter() - begin
        return self.by_key[key]


class GraphForward(Forward):
    """Replays graphs of batches, captured on first use or in `prepare`."""

    def __init__(
        self,
        model: Decoder,
        cache: PagedCache,
        temperature: float = 1.0,
        max_num_logits: int = 8192,
        longest: int | None = None,
        record: Recorder | None = None,
    ) -> None:
        """longest: most tokens of a sequence; default: the model's context."""
        super().__init__(model, cache, temperature, max_num_logits)
        # One table width: wider costs nothing.
        self.pages = min(-(-(longest or model.config.context_limit) // cache.page_size), cache.num_pages)
        self.graphs = Graphs(self.device, record)
        # Written by every graph of a kind: final hidden states, and what an evicting step's second graph reads.
        self._hidden = self._rows(model.config.hidden)
        self._half: Half | None = None

    def _rows(self, *shape: int) -> Tensor:
        weight = self.model.embedding.weight
        return torch.empty(MAX_ROWS, *shape, dtype=weight.dtype, device=self.device)

    def states(self, batch: Batch) -> tuple[Tensor, DeviceClock]:
        padded = self._padded(batch)
        if padded is None:
            return super().states(batch)
        graph = self._whole(padded)
        sampled = self.inputs({"sampled": batch.sampled})["sampled"]
        clock = DeviceClock(self.device)
        graph.replay()
        return graph.answer[sampled], clock

    def states_evicting(self, batch: Batch) -> tuple[Tensor, DeviceClock, Retained, Floats]:
        padded = self._padded(batch)
        if padded is None:
            return super().states_evicting(batch)
        assert batch.evict is not None
        graph = self._first(padded)
        clock = DeviceClock(self.device)
        graph.replay()
        growth = graph.answer[: len(batch.evict.masked)].cpu().numpy()  # the only wait
        retained = evicting.keep(batch, growth)
        num = len(retained.rows)
        graph = self._second(padded, retained)
        graph.replay()
        return graph.answer[:num], clock, retained, growth.copy()

    def _padded(self, batch: Batch) -> Batch | None:
        """None: the batch runs eagerly."""
        size = len(batch.tokens), len(batch.history)
        shape: tuple[int, int] | None = padded_shape(*size)
        if batch.prefill:
            shape = prefill_shape(*size)
        if shape is None or size[0] > MAX_ROWS or batch.page_table.shape[1] > self.pages or self.by_entropy:
            return None
        return pad(batch, *shape, self.pages)

    @torch.inference_mode()
    def prepare(self, policy: Policy, max_batch: int, limit: int | None = None) -> None:
        """Capture what a policy's steps can need, largest first.

        limit: captures of each kind; others are captured on first use, and have room.
        """
        shapes, width, block = reachable(policy, max_batch), policy.width, policy.block_length
        if not shapes:
            return
        steps = [blank(*shape, self.pages, width, block) for shape in shapes]
        prefill_shapes = reachable_prefills(policy, max_batch, self.pages * self.cache.page_size)
        prefills = [blank(*shape, self.pages, 1, block) for shape in prefill_shapes]
        halves: list[Batch] = []
        if isinstance(policy.eviction, Focus):  # all rows are masks
            for batch in steps:
                evict = Evict(policy.eviction, batch.sampled, batch.query_start, lambda growth: growth > 0)
                halves.append(replace(batch, evict=evict))
        # Make room before graphs read it.
        self.graphs.make_room(max(len(flattened(batch.arrays())[0]) for batch in [*steps, *prefills, *halves]))
        for batch in sorted([*steps[:limit], *prefills[:limit]], key=lambda batch: -len(batch.tokens)):
            self._whole(batch)
        for batch in halves[:limit]:
            self._first(batch)
        widest = {len(batch.history): batch for batch in reversed(halves)}
        if halves:
            for num_rows, sequences in reachable_after(shapes)[:limit]:
                none = np.zeros(0, np.int64)
                listed = np.zeros((0, width), np.bool_)
                retained = Retained(none, none, none, query_start=np.zeros(1, np.int64), listed=listed)
                self._second(widest[sequences], pad_retained(retained, num_rows, sequences))

    def _whole(self, padded: Batch) -> Captured:
        """All layers."""

        def compute(inputs: Inputs) -> Tensor:
            return self._hidden[: len(padded.tokens)].copy_(self.hidden(inputs, padded))

        return self.graphs.captured(_key("whole", len(padded.tokens), padded), padded.arrays(), compute)

    def _first(self, padded: Batch) -> Captured:
        """An evicting step up to the choice; answers masks' growth of importance."""
        config = self.model.config
        if self._half is None:
            turns = config.head_dim // 2
            q = self._rows(config.heads, config.head_dim)
            self._half = Half(self._rows(config.hidden), q, self._rows(turns), self._rows(turns))
        stored = self._half

        def compute(inputs: Inputs) -> Tensor:
            half, growth = evicting.through_two(self, inputs, padded)
            for target, rows in zip(stored, half, strict=True):
                target[: len(rows)].copy_(rows)
            return growth

        return self.graphs.captured(_key("first", len(padded.tokens), padded), padded.arrays(), compute)

    def _second(self, padded: Batch, retained: Retained) -> Captured:
        """The retained rows through the other layers."""
        sequences, num_rows = len(padded.history), padded_shape(len(retained.rows), 1)[0]
        arrays: dict[str, npt.NDArray[Any]] = {"history": padded.history, "page_table": padded.page_table}
        arrays |= pad_retained(retained, num_rows, sequences).arrays()

        def compute(inputs: Inputs) -> Tensor:
            assert self._half is not None
            return self._hidden[:num_rows].copy_(evicting.finish_rows(self, self._half, inputs, padded))

        return self.graphs.captured(_key("second", num_rows, padded), arrays, compute)


def _key(kind: str, rows: int, padded: Batch) -> Key:
    return kind, rows, *padded.listed.shape, padded.block_length
