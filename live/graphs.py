"""A forward whose decode steps are captured CUDA graphs, one a padded shape: launches cost almost nothing.

Small prefills are captured, too; others hide their launches. An evicting step is two graphs, between which the host
chooses the rows. A prefill, or a step with only masks through the head, is two graphs without a wait. All
share one memory pool: answers are read before the next launch. Without CUDA a graph recomputes into the same tensors,
so that tests check padding, aliasing and choice.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..engine.latency import bucket
from ..engine.policies.focus import Focus
from ..engine.policy import Policy
from . import evicting
from .cache import PagedCache
from .evicting import Array, Evict, Half, Inputs, Retained
from .forward import Batch, DeviceClock, Forward, Sampled, Shapes, flattened, stacked, unflattened
from .model import Decoder
from .padding import (
    MAX_ROWS,
    PREFILL_SEQUENCES,
    pad,
    pad_retained,
    padded_shape,
    prefill_shape,
    reachable,
    reachable_after,
    reachable_prefills,
)

Key = tuple[object, ...]
Answers = tuple[Tensor, ...]
Launches = Callable[[], Answers]
# Records launches; returns their repetition, and the answers.
Recorder = Callable[[Launches], tuple[Callable[[], None], Answers]]


class CudaRecorder:
    """Captures graphs in one pool, largest first: smaller ones reuse its memory."""

    def __init__(self) -> None:
        # PyTorch cannot capture into a pool whose last graph is gone: this one keeps it.
        number = torch.zeros(1, device="cuda")
        self._first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._first):
            number += 1
        self._pool = self._first.pool()

    def __call__(self, compute: Launches) -> tuple[Callable[[], None], Answers]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile and allocate first
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            answers = compute()
        return graph.replay, answers


def recompute(compute: Launches) -> tuple[Callable[[], None], Answers]:
    """For devices without graphs."""
    answers = tuple(answer.clone() for answer in compute())

    def replay() -> None:
        for target, fresh in zip(answers, compute(), strict=True):
            target.copy_(fresh)

    return replay, answers


class Captured(NamedTuple):
    replay: Callable[[], None]
    answers: Answers


class Staged:
    """Numbers on the device that graphs read, brought through pinned memory of the host."""

    def __init__(self, device: torch.device, size: int = 0) -> None:
        self.numbers = torch.zeros(size, dtype=torch.int64, device=device)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")

    def __len__(self) -> int:
        return len(self.numbers)

    def bring(self, flat: Array) -> None:
        # The host has waited for the last copy's step.
        self._host[: len(flat)] = torch.from_numpy(flat)
        self.numbers[: len(flat)].copy_(self._host[: len(flat)], non_blocking=True)


class Graphs:
    """Captured launches by key, and the inputs that all of them read."""

    def __init__(self, device: torch.device, record: Recorder | None = None) -> None:
        self.by_key: dict[Key, Captured] = {}
        self.num_captures = 0
        self.seconds = 0.0  # of captures
        self._device = device
        self._record = record or (CudaRecorder() if device.type == "cuda" else recompute)
        self._inputs = Staged(device)

    def bring(self, flat: Array) -> None:
        if len(flat) > len(self._inputs):
            self.by_key.clear()  # they read the old tensor
            self._inputs = Staged(self._device, max(len(flat), 2 * len(self._inputs)))
        self._inputs.bring(flat)

    def inputs(self, shapes: Shapes, names: Collection[str] | None = None) -> Inputs:
        return unflattened(self._inputs.numbers, shapes, names)

    def captured(
        self, key: Key, arrays: Callable[[], Mapping[str, npt.NDArray[Any]]], compute: Callable[[Shapes], Answers]
    ) -> Captured:  # fmt: skip
        """Records the graph of a computation on inputs like `arrays`, on first use."""
        if key not in self.by_key:
            flat, shapes = flattened(arrays())
            self.bring(flat)
            self.num_captures += 1
            begin = time.perf_counter()
            self.by_key[key] = Captured(*self._record(lambda: compute(shapes)))
            self.seconds += time.perf_counter() - begin
        return self.by_key[key]

    def drop(self, stale: Callable[[Key], bool]) -> None:
        self.by_key = {key: graph for key, graph in self.by_key.items() if not stale(key)}


class Between(NamedTuple):
    """What passes between an evicting step's graphs, with room for the largest."""

    half: Half
    retained: Staged  # the retained rows' arrays
    sequences: int

    @classmethod
    def blank(cls, model: Decoder, rows: int, sequences: int, width: int) -> "Between":
        config, weight = model.config, model.embedding.weight

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=weight.dtype, device=weight.device)

        turns = config.head_dim // 2
        half = Half(zeros(config.hidden), zeros(config.heads, config.head_dim), zeros(turns), zeros(turns))
        size = len(flattened(blank_retained(rows, sequences, width).arrays())[0])
        return cls(half, Staged(weight.device, size), sequences)

    def bring(self, retained: Retained) -> None:
        self.retained.bring(flattened(retained.arrays())[0])


class GraphForward(Forward):
    """Replays graphs of decode batches, captured on first use or in `prepare`."""

    def __init__(
        self, model: Decoder, cache: PagedCache, temperature: float = 1.0, max_num_logits: int = 8192,
        longest: int | None = None, record: Recorder | None = None,
    ) -> None:  # fmt: skip
        """longest: most tokens of a sequence; default: the model's context."""
        super().__init__(model, cache, temperature, max_num_logits)
        limit = model.config.context_limit if longest is None else longest
        # One table width: wider costs nothing.
        self.pages = min(-(-limit // cache.page_size), cache.num_pages)
        self.graphs = Graphs(self.device, record)
        self._between: dict[int, Between] = {}  # by the window's width
        # A separate head's input: hidden states, and rows to sample.
        self._states = torch.zeros(0, 0, device=self.device)
        self._picked = Staged(self.device)

    @property
    def captured_shapes(self) -> set[Key]:
        """Rows, sequences and width of captured steps without eviction."""
        return {key[1:4] for key in self.graphs.by_key if key[0] == "step"}

    @torch.inference_mode()
    def run(self, batch: Batch) -> Sampled:
        if self._is_eager(batch):
            return super().run(batch)
        padded = self._padded(batch)
        if batch.prefill or batch.own_head:
            return self._replay_with_head(padded, batch.sampled)
        if batch.evict is not None:
            return self._replay_evicting(padded, batch)
        step = self._step(padded)
        self.graphs.bring(flattened(padded.arrays())[0])
        return self._replayed([step], len(batch.tokens))

    def _is_eager(self, batch: Batch) -> bool:
        num_rows = len(batch.tokens)
        if batch.uniform is not None or batch.page_table.shape[1] > self.pages or self.by_entropy:
            return True
        if batch.prefill:
            return prefill_shape(num_rows, len(batch.history)) is None
        return (len(batch.sampled) != num_rows and not batch.own_head) or num_rows > MAX_ROWS

    def _padded(self, batch: Batch) -> Batch:
        size = len(batch.tokens), len(batch.history)
        shape = prefill_shape(*size) if batch.prefill else padded_shape(*size)
        assert shape is not None, "an eager prefill is not padded"
        return pad(batch, *shape, self.pages, batch.listed.shape[1])

    @torch.inference_mode()
    def prepare(self, policy: Policy, max_batch: int, limit: int | None = None) -> None:
        """Capture what a policy's decode steps can need, largest first.

        limit: captures of each kind; others are captured on first use, and have room.
        """
        shapes, width, block = reachable(policy, max_batch), policy.width, policy.block_length
        if not shapes:
            return
        rule = policy.eviction if isinstance(policy.eviction, Focus) else None
        masks_alone = policy.unmasking.head == "masks"
        steps = [blank(*shape, self.pages, width, block) for shape in shapes]
        longest = self.pages * self.cache.page_size
        layers = [blank(*x, self.pages, 1, block) for x in reachable_prefills(policy, max_batch, longest)]
        heads = {bucket(block * n) for n in range(1, min(max_batch, PREFILL_SEQUENCES[-1]) + 1)}
        halves: list[Batch] = []
        if rule is not None:  # all rows are masks
            evicts = [Evict(rule, batch.sampled, batch.query_start, lambda growth: growth > 0) for batch in steps]
            halves = [replace(batch, evict=evict) for batch, evict in zip(steps, evicts, strict=True)]
        # Make room before graphs read it.
        room = max(len(flattened(batch.arrays())[0]) for batch in [*steps, *layers, *halves])
        self.graphs.bring(np.zeros(room, np.int64))
        if masks_alone:
            heads |= {bucket(n) for n in range(1, shapes[0][0] + 1)}
            layers, steps = sorted([*layers, *steps], key=lambda batch: -len(batch.tokens)), []
        for batch in steps[:limit]:
            self._step(batch)
        for batch in layers[:limit]:
            self._layers(batch)
        for num in sorted((n for n in heads if n <= len(layers[0].tokens)), reverse=True)[:limit]:
            self._head(layers[0], num)
        if not halves:
            return
        between = self._room(max(rows for rows, _ in shapes), max(sequences for _, sequences in shapes), width)
        for batch in halves[:limit]:
            self._half(batch)
        widest = {len(batch.history): batch for batch in reversed(halves)}
        for num_rows, sequences in reachable_after(shapes)[:limit]:
            between.bring(blank_retained(num_rows, sequences, width))
            self._rest(widest[sequences], num_rows)

    def _replayed(self, graphs: list[Captured], num: int) -> Sampled:
        """Launch graphs; answers are the last one's first `num` rows."""
        clock = DeviceClock(self.device)
        for graph in graphs:
            graph.replay()
        return self._answered(clock, graphs[-1] if num else None, num)

    def _answered(self, clock: DeviceClock, graph: Captured | None, num: int) -> Sampled:
        """Tokens and confidences."""
        clock.stop()
        self._meanwhile()
        tokens, confidence = np.zeros((2, 0)) if graph is None else graph.answers[0][:, :num].cpu().numpy()
        return Sampled(tokens.astype(np.int64), confidence.astype(np.float32), clock.seconds())

    def _replay_with_head(self, padded: Batch, sampled: Array) -> Sampled:
        num = len(sampled)
        graphs = [self._layers(padded), *([self._head(padded, bucket(num))] if num else [])]
        self.graphs.bring(flattened(padded.arrays())[0])
        self._picked.bring(np.pad(sampled, (0, bucket(num) - num)))
        return self._replayed(graphs, num)

    def _replay_evicting(self, padded: Batch, batch: Batch) -> Sampled:
        assert batch.evict is not None
        half, between = self._half(padded), self._between[padded.listed.shape[1]]
        self.graphs.bring(flattened(padded.arrays())[0])
        clock = DeviceClock(self.device)
        half.replay()
        growth = half.answers[0][: len(batch.evict.masked)].cpu().numpy()  # the only wait
        retained = evicting.keep(batch, growth)
        num = len(retained.rows)
        between.bring(pad_retained(retained, bucket(num), len(padded.history)))
        graph = self._rest(padded, bucket(num))
        graph.replay()
        return replace(self._answered(clock, graph, num), rows=retained.rows, growth=growth.copy())

    def _step(self, padded: Batch) -> Captured:
        def compute(shapes: Shapes) -> tuple[Tensor]:
            return (stacked(self._answers(self.graphs.inputs(shapes), padded)),)

        return self.graphs.captured(_key("step", padded), padded.arrays, compute)

    def _layers(self, padded: Batch) -> Captured:
        """A step's layers, up to the head's hidden states."""
        self._make_states(len(padded.tokens))
        states = self._states[: len(padded.tokens)]

        def compute(shapes: Shapes) -> tuple[Tensor]:
            states.copy_(self._hidden(self.graphs.inputs(shapes), padded))
            return (states,)

        return self.graphs.captured(_key("layers", padded), padded.arrays, compute)

    def _head(self, padded: Batch, num: int) -> Captured:
        """The head over `num` rows, padding included."""
        self._make_states(len(padded.tokens))

        def compute(shapes: Shapes) -> tuple[Tensor]:
            return (stacked(self._sample(self._states[self._picked.numbers[:num]], None)),)

        return self.graphs.captured(("head", num), padded.arrays, compute)

    def _make_states(self, rows: int) -> None:
        """Make room for `rows` hidden states; drop graphs that read the old."""
        if rows <= len(self._states):
            return
        self.graphs.drop(lambda key: key[0] in ("layers", "head"))
        weight = self.model.embedding.weight
        self._states = torch.zeros(rows, self.model.config.hidden, dtype=weight.dtype, device=self.device)
        self._picked = Staged(self.device, rows)

    def _half(self, padded: Batch) -> Captured:
        """An evicting step up to the choice; answers masks' growth of importance."""
        rows, (sequences, width) = len(padded.tokens), padded.listed.shape
        between = self._room(rows, sequences, width).half

        def compute(shapes: Shapes) -> tuple[Tensor]:
            inputs, attend = self.graphs.inputs(shapes), self._attending(padded)
            half, growth = evicting.through_two(self.model, inputs, self._pages, attend)
            for name in Half.__slots__:
                getattr(between, name)[:rows].copy_(getattr(half, name))
            return (growth,)

        return self.graphs.captured(_key("half", padded), padded.arrays, compute)

    def _rest(self, padded: Batch, rows: int) -> Captured:
        """The retained `rows` with padding."""
        evict, (sequences, width) = padded.evict, padded.listed.shape
        assert evict is not None
        between = self._room(rows, sequences, width)
        _, retained_shapes = flattened(blank_retained(rows, sequences, width).arrays())

        def compute(shapes: Shapes) -> tuple[Tensor]:
            inputs = self.graphs.inputs(shapes, {"history", "page_table", "listed"})
            retained, attend = unflattened(between.retained.numbers, retained_shapes), self._attending(padded)
            hidden = evicting.finish_rows(self.model, between.half, inputs, retained, self._pages, attend)
            return (stacked(self._sample(hidden, None)),)

        key = "rest", rows, sequences, width, padded.block_length, evict.rule
        return self.graphs.captured(key, padded.arrays, compute)

    def _room(self, rows: int, sequences: int, width: int) -> Between:
        """Larger room drops the smaller one's graphs."""
        have = self._between.get(width)
        if have is not None and rows <= len(have.half.x) and sequences <= have.sequences:
            return have
        if have is not None:
            rows, sequences = max(rows, len(have.half.x)), max(sequences, have.sequences)
            self.graphs.drop(lambda key: key[0] in ("half", "rest") and key[3] == width)
        self._between[width] = Between.blank(self.model, rows, sequences, width)
        return self._between[width]


def _key(kind: str, padded: Batch) -> Key:
    rows, (sequences, width) = len(padded.tokens), padded.listed.shape
    return kind, rows, sequences, width, padded.block_length


def blank(rows: int, sequences: int, pages: int, width: int, block_length: int) -> Batch:
    """A decode batch that writes and sees nothing."""
    zeros = np.zeros(rows, np.int64)
    return Batch(
        tokens=zeros, positions=zeros, places=zeros - 1, query_start=np.arange(sequences + 1) * rows // sequences,
        page_table=np.full((sequences, pages), -1, np.int32), history=np.zeros(sequences, np.int64),
        listed=np.zeros((sequences, width), np.bool_), block_length=block_length, sampled=np.arange(rows), spare=1,
    )  # fmt: skip


def blank_retained(rows: int, sequences: int, width: int) -> Retained:
    """Padding alone."""
    none = np.zeros(0, np.int64)
    return pad_retained(
        Retained(none, none, none, np.zeros(1, np.int64), np.zeros((0, width), np.bool_)), rows, sequences
    )
