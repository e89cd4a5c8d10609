"""A forward whose decode steps are captured CUDA graphs, one a padded shape: launching them costs next to nothing.

Prefill, whose shape is never the same twice, stays eager. A step that evicts is two graphs round the one wait for how
many rows go on: all rows as far as the choice, and what is left from there. A step whose masks alone go through the
head is two graphs as well, and waits for nothing between them. All graphs share one pool of memory, since one's answer
is read before the next is launched.

Without CUDA a graph computes again what it recorded, into the same tensors: slower, and the same numbers, by which
padding, aliasing and the choice of graphs are tested.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..engine.latency import bucket
from ..engine.policies.focus import Focus
from ..engine.policy import Policy
from .cache import PagedCache
from .evicting import Array, Chosen, Evict, Retained, choose_rows, finish_rows, gather
from .forward import Batch, Forward, Sampled, flat_size
from .model import Decoder
from .padding import MAX_ROWS, computes_whole_blocks, pad, reachable, reachable_after, shape_of

Key = tuple[object, ...]


class Recorder(Protocol):
    """Records what a callable launches; the device's, or a test's."""

    def __call__(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        """How to launch it all again, and the tensors in which the answers will lie."""


class CudaRecorder:
    """Captures CUDA graphs in one pool: the largest first, and smaller ones lie where its intermediate results did."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles and allocates outside the recording
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            answers = compute()
        return graph.replay, answers


def recompute(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """A recorder for devices without graphs."""
    answers = tuple(answer.clone() for answer in compute())

    def replay() -> None:
        for held, fresh in zip(answers, compute(), strict=True):
            held.copy_(fresh)

    return replay, answers


class Captured(NamedTuple):
    """A recorded graph, and where its answers come."""

    replay: Callable[[], None]
    answers: tuple[Tensor, ...]


class Between(NamedTuple):
    """Where the rows of a step that evicts lie between its two graphs, for as many rows as any step has."""

    chosen: Chosen
    kept: Retained

    @classmethod
    def of(cls, model: Decoder, rows: int, sequences: int, width: int) -> "Between":
        config, weight = model.config, model.embedding.weight

        def wide(*shape: int, dtype: torch.dtype = weight.dtype) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=weight.device)

        def streams() -> list[Tensor]:
            half = config.head_dim // 2
            return [wide(config.hidden), wide(config.heads, config.head_dim), wide(half), wide(half)]

        x, q, cos, sin = streams()
        chosen = Chosen(x, q, cos, sin, wide(dtype=torch.bool), wide(dtype=torch.float32))
        start = torch.zeros(sequences + 1, dtype=torch.int32, device=weight.device)
        seen = torch.zeros(sequences, width, dtype=torch.bool, device=weight.device)
        positions, places, indices = wide(dtype=torch.int32), wide(dtype=torch.int64), wide(dtype=torch.int64)
        x, q, cos, sin = streams()
        return cls(chosen, Retained(x, q, cos, sin, positions, places, indices, start, seen))


class GraphForward(Forward):
    """Runs decode batches by replaying graphs; a shape is captured by `prepare`, or when it is first seen."""

    def __init__(
        self, model: Decoder, cache: PagedCache, temperature: float = 1.0, max_num_logits: int = 8192,
        longest: int | None = None, record: Recorder | None = None,
    ) -> None:  # fmt: skip
        """longest: most tokens that a sequence may have; the model's context unless given."""
        super().__init__(model, cache, temperature, max_num_logits)
        limit = model.config.context_limit if longest is None else longest
        # One width of tables for all: a graph's launches follow from shapes, and a table's width costs them nothing.
        self.pages = min(-(-limit // cache.page_size), cache.num_pages)
        self.num_captures = 0  # since the beginning
        self._record = record or (CudaRecorder() if self.device.type == "cuda" else recompute)
        self._graphs: dict[Key, Captured] = {}
        self._held = torch.zeros(0, dtype=torch.int64, device=self.device)  # the inputs of whatever graph runs
        self._staged = torch.zeros(0, dtype=torch.int64)  # the same on the host
        self._between: dict[int, Between] = {}  # by the width of a window
        # What the head reads where it is a graph of its own: hidden states, and which rows of them.
        self._states = torch.zeros(0, 0, device=self.device)
        self._picked = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._staged_picks = torch.zeros(0, dtype=torch.int64)
        self._laid: tuple[Batch, Batch, Array] | None = None  # the next step's batch, padded, and that in one array

    def run(self, batch: Batch) -> Sampled:
        """Compute a batch, its keys and values written to the cache."""
        if self._is_eager(batch):
            return super().run(batch)
        if batch.own_head:
            return self._replay_with_head(self._padded(batch), batch.sampled)
        if batch.evict is not None:
            return self._replay_evicting(self._padded(batch), batch)
        laid, self._laid = self._laid, None
        if laid is None or laid[0] is not batch:
            padded = self._padded(batch)
            return self._replay(padded, self._flatten(padded)[0], len(batch.tokens))
        _, padded, flat = laid
        before = flat_size(x.shape for x in (padded.query_start, padded.history, padded.page_table, padded.listed))
        flat[before : before + len(batch.tokens)] = batch.tokens
        return self._replay(padded, flat, len(batch.tokens))

    def lay_out(self, batch: Batch) -> None:
        if not (self._is_eager(batch) or batch.own_head or batch.evict):
            padded = self._padded(batch)
            self._laid = batch, padded, self._flatten(padded)[0]

    def _is_eager(self, batch: Batch) -> bool:
        num_rows = len(batch.tokens)
        plain = batch.prefill or batch.keys is not None or (len(batch.sampled) != num_rows and not batch.own_head)
        return plain or num_rows > MAX_ROWS or batch.page_table.shape[1] > self.pages

    def _padded(self, batch: Batch) -> Batch:
        rows, sequences = shape_of(batch)
        return pad(batch, rows, sequences, self.pages, batch.listed.shape[1])

    @torch.inference_mode()
    def prepare(self, policy: Policy, max_batch: int, forced: bool = False) -> None:
        """Capture all that a policy's decode steps can need, the largest first, before the clock starts.

        forced: what goes on past an eviction is drawn, not chosen.
        """
        shapes, width, block = reachable(policy, max_batch), policy.width, policy.block_length
        rule = policy.eviction if isinstance(policy.eviction, Focus) else None
        whole = computes_whole_blocks(policy)
        blanks = [blank(rows, sequences, self.pages, width, block, whole) for rows, sequences in shapes]
        evicting = [] if rule is None else [blank_evicting(b, rule, forced) for b in blanks]
        if not blanks:
            return
        # Room for the largest of each before anything is recorded that lies there.
        self._bring(np.zeros(max(len(self._flatten(b)[0]) for b in [*blanks, *evicting]), np.int64))
        if evicting:
            self._room(max(rows for rows, _ in shapes), max(sequences for _, sequences in shapes), width)
        if policy.unmasking.head == "masks":
            most = blanks[0]
            for b in blanks:
                self._layers(b)
            for rows in sorted({bucket(n) for n in range(1, len(most.tokens) + 1)}, reverse=True):
                self._head(most, rows)
            return
        for b in blanks:
            self._step(b)
        for b in evicting:
            self._half(b)
        largest = {len(b.history): b for b in reversed(evicting)}
        for left, sequences in reachable_after(shapes) if evicting else ():
            self._rest(largest[sequences], left)

    @torch.inference_mode()
    def _replay(self, padded: Batch, flat: Array, num_rows: int) -> Sampled:
        captured = self._step(padded)
        self._bring(flat)
        clock = _Clock(self.device)
        captured.replay()
        clock.stop()
        self._meanwhile()
        both = captured.answers[0].cpu().numpy()
        return Sampled(both[0, :num_rows].astype(np.int64), both[1, :num_rows].astype(np.float32), clock.seconds())

    @torch.inference_mode()
    def _replay_with_head(self, padded: Batch, sampled: Array) -> Sampled:
        num = len(sampled)
        layers = self._layers(padded)
        head = self._head(padded, bucket(num)) if num else None
        self._bring(self._flatten(padded)[0])
        self._staged_picks[:num] = torch.from_numpy(sampled)
        self._staged_picks[num : bucket(num)] = 0
        self._picked.copy_(self._staged_picks, non_blocking=True)
        clock = _Clock(self.device)
        layers.replay()
        if head is not None:
            head.replay()
        clock.stop()
        self._meanwhile()
        both = np.zeros((2, 0)) if head is None else head.answers[0][:, :num].cpu().numpy()
        return Sampled(both[0].astype(np.int64), both[1].astype(np.float32), clock.seconds())

    @torch.inference_mode()
    def _replay_evicting(self, padded: Batch, batch: Batch) -> Sampled:
        evict = batch.evict
        assert evict is not None
        flat, shapes = self._flatten(padded)
        half, between = self._half(padded), self._between[padded.listed.shape[1]]
        self._bring(flat)
        clock = _Clock(self.device)
        half.replay()
        num_retained = int(half.answers[0])  # the one wait of the step
        own = {name: shapes[name] for name in ("query_start", "listed", "positions", "places", "cells")}
        rows = len(padded.tokens)
        chosen = Chosen(**{name: getattr(between.chosen, name)[:rows] for name in Chosen.__slots__})
        kept = gather(chosen, self._unflatten(self._held, shapes, set(own)), evict.rule, num_retained)
        # Rows beyond those are padding of the second graph: they write nothing, and no sequence has them.
        between.kept.places.fill_(-1)
        for name in Retained.__slots__:
            source = getattr(kept, name)
            getattr(between.kept, name)[: len(source)].copy_(source)
        rest = self._rest(padded, bucket(num_retained))
        rest.replay()
        clock.stop()
        self._meanwhile()
        both = rest.answers[0][:, :num_retained].cpu().numpy()
        return Sampled(
            both[0].astype(np.int64), both[1].astype(np.float32), clock.seconds(),
            both[2].astype(np.int64), chosen.delta[: len(evict.masked)].clone(),
        )  # fmt: skip

    def _step(self, padded: Batch) -> Captured:
        """The graph of a step that evicts nothing."""
        planned = self._planned = self._plan(padded, self.pages)
        rows, (sequences, width) = len(padded.tokens), padded.listed.shape
        key = ("step", rows, sequences, width, padded.block_length, planned is not None)
        if key not in self._graphs:
            flat, shapes = self._flatten(padded)

            def compute() -> tuple[Tensor]:
                tokens, confidence = self._compute(self._unflatten(self._held, shapes), padded.block_length)
                return (torch.stack([tokens.to(torch.float64), confidence.to(torch.float64)]),)

            self._capture(key, flat, compute)
        return self._graphs[key]

    def _layers(self, padded: Batch) -> Captured:
        """The graph of a step's layers; where the head finds their hidden states, they lie."""
        planned = self._planned = self._plan(padded, self.pages)
        rows, (sequences, width) = len(padded.tokens), padded.listed.shape
        self._make_states(rows)
        key = ("layers", rows, sequences, width, padded.block_length, planned is not None)
        if key not in self._graphs:
            flat, shapes = self._flatten(padded)
            states = self._states[:rows]

            def compute() -> tuple[Tensor]:
                states.copy_(self._hidden(self._unflatten(self._held, shapes), padded.block_length))
                return (states,)

            self._capture(key, flat, compute)
        return self._graphs[key]

    def _head(self, padded: Batch, num: int) -> Captured:
        """The graph of the head over `num` rows of a step's, padding among them."""
        self._make_states(len(padded.tokens))
        key = ("head", num)
        if key not in self._graphs:

            def compute() -> tuple[Tensor]:
                answers = self._sample(self._states[self._picked[:num]], None)
                return (torch.stack([answer.to(torch.float64) for answer in answers]),)

            self._capture(key, self._flatten(padded)[0], compute)
        return self._graphs[key]

    def _make_states(self, rows: int) -> None:
        """Room for so many rows' hidden states; where it is made anew, graphs that read the old one are gone."""
        if rows <= len(self._states):
            return
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] not in ("layers", "head")}
        weight = self.model.embedding.weight
        self._states = torch.zeros(rows, self.model.config.hidden, dtype=weight.dtype, device=self.device)
        self._picked = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._staged_picks = torch.zeros(rows, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _half(self, padded: Batch) -> Captured:
        """The graph of a step that evicts as far as the choice: its answer is how many rows go on."""
        evict, rows, (sequences, width) = padded.evict, len(padded.tokens), padded.listed.shape
        assert evict is not None
        key = ("half", rows, sequences, width, padded.block_length, evict.rule, evict.forced is None)
        if key not in self._graphs:
            flat, shapes = self._flatten(padded)
            between = self._room(rows, sequences, width).chosen

            def compute() -> tuple[Tensor]:
                inputs = self._unflatten(self._held, shapes)
                attend = self._attending(padded.block_length)
                chosen = choose_rows(self.model, inputs, evict.rule, self._keep, attend)
                for name in Chosen.__slots__:
                    getattr(between, name)[:rows].copy_(getattr(chosen, name))
                return (chosen.retained.sum(),)

            self._capture(key, flat, compute)
        return self._graphs[key]

    def _rest(self, padded: Batch, left: int) -> Captured:
        """The graph of what goes on: `left` rows, padding among them, of the sequences of a step that evicts."""
        evict, (sequences, width) = padded.evict, padded.listed.shape
        assert evict is not None
        key = ("rest", left, sequences, width, padded.block_length, evict.rule)
        if key not in self._graphs:
            flat, shapes = self._flatten(padded)
            between = self._room(left, sequences, width).kept
            own = {"history", "page_table", "listed"}

            def compute() -> tuple[Tensor]:
                inputs = self._unflatten(self._held, shapes, own)
                sizes = {"start": sequences + 1, "seen": sequences}
                kept = Retained(
                    **{name: getattr(between, name)[: sizes.get(name, left)] for name in Retained.__slots__}
                )
                attend = self._attending(padded.block_length)
                hidden = finish_rows(self.model, kept, inputs, evict.rule, self._keep, attend)
                tokens, confidence = self._sample(hidden, None)
                return (torch.stack([x.to(torch.float64) for x in (tokens, confidence, kept.rows)]),)

            self._capture(key, flat, compute)
        return self._graphs[key]

    def _room(self, rows: int, sequences: int, width: int) -> Between:
        """Room between two graphs; where a larger one is wanted than any before, graphs of the smaller are gone."""
        have = self._between.get(width)
        if have is not None and rows <= len(have.chosen.x) and sequences < len(have.kept.start):
            return have
        if have is not None:
            rows, sequences = max(rows, len(have.chosen.x)), max(sequences, len(have.kept.seen))
            self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] == "step" or key[3] != width}
        self._between[width] = Between.of(self.model, rows, sequences, width)
        return self._between[width]

    def _capture(self, key: Key, flat: Array, compute: Callable[[], tuple[Tensor, ...]]) -> None:
        self._bring(flat)
        self.num_captures += 1
        self._graphs[key] = Captured(*self._record(compute))

    def _bring(self, flat: Array) -> None:
        """Put a step's inputs where graphs find them."""
        if len(flat) > len(self._held):
            # Graphs recorded before read the tensor before, which is theirs no more.
            self._graphs = {}
            size = max(len(flat), 2 * len(self._held))
            self._held = torch.zeros(size, dtype=torch.int64, device=self.device)
            self._staged = torch.zeros(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        # The last step's copy is over: its answer was waited for.
        self._staged[: len(flat)] = torch.from_numpy(flat)
        self._held[: len(flat)].copy_(self._staged[: len(flat)], non_blocking=True)


class _Clock:
    """The device's time from here to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._took = time.perf_counter()
        if self._cuda:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._begin.record()

    def stop(self) -> None:
        if self._cuda:
            self._end.record()
        self._took = time.perf_counter() - self._took

    def seconds(self) -> float:
        """Once the device is done, for which it waits."""
        if self._cuda:
            self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3 if self._cuda else self._took


def blank(rows: int, sequences: int, pages: int, width: int, block_length: int, whole: bool = False) -> Batch:
    """A decode batch that writes nothing and sees nothing."""
    zeros = np.zeros(rows, np.int64)
    return Batch(
        tokens=zeros, positions=zeros, places=zeros - 1, query_start=np.arange(sequences + 1) * rows // sequences,
        page_table=np.full((sequences, pages), -1, np.int32), history=np.zeros(sequences, np.int64),
        listed=np.zeros((sequences, width), np.bool_), block_length=block_length, sampled=np.arange(rows),
        whole=whole,
    )  # fmt: skip


def blank_evicting(batch: Batch, rule: Focus, forced: bool) -> Batch:
    """The same that may evict: all rows are masks, and none goes on."""
    rows, (sequences, width) = len(batch.tokens), batch.listed.shape
    nobody, zeros = np.zeros(rows, np.bool_), np.zeros(sequences, np.int32)
    cells = np.minimum(np.arange(rows), sequences * width - 1)
    evict = Evict(
        rule, np.arange(rows), batch.query_start, cells, zeros, zeros, zeros.astype(np.int64) - 1,
        nobody if forced else None, nobody,
    )  # fmt: skip
    return replace(batch, evict=evict)
