"""A forward whose decode steps are captured CUDA graphs, one a padded shape: launches cost almost nothing.

Small prefills are captured, too; others hide their launches. An evicting step is two graphs, between which the host
chooses the rows. A prefill, or a step with only masks through the head, is two graphs without a wait. All
share one memory pool: answers are read before the next launch. Without CUDA a graph recomputes into the same tensors,
so that tests check padding, aliasing and choice.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..engine.latency import bucket
from ..engine.policies.focus import Focus
from ..engine.policy import Policy
from . import evicting
from .cache import PagedCache
from .clock import DeviceClock
from .evicting import Array, Evict, Half, Inputs, Retained
from .forward import Batch, Forward, Sampled, Shapes, flat_size, flattened_retained, stacked
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
        for held, fresh in zip(answers, compute(), strict=True):
            held.copy_(fresh)

    return replay, answers


class Captured(NamedTuple):
    replay: Callable[[], None]
    answers: Answers


class Between(NamedTuple):
    """What passes between an evicting step's graphs, with room for the largest."""

    half: Half
    kept: Tensor  # the retained rows' arrays
    staged: Tensor  # ... on the host
    sequences: int

    @classmethod
    def of(cls, model: Decoder, rows: int, sequences: int, width: int) -> "Between":
        config, weight = model.config, model.embedding.weight

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=weight.dtype, device=weight.device)

        turns = config.head_dim // 2
        half = Half(zeros(config.hidden), zeros(config.heads, config.head_dim), zeros(turns), zeros(turns))
        size = flat_size([(rows,)] * 3 + [(sequences + 1,), (sequences, width)])
        staged = torch.zeros(size, dtype=torch.int64, pin_memory=weight.is_cuda)
        return cls(half, torch.zeros(size, dtype=torch.int64, device=weight.device), staged, sequences)

    def bring(self, kept: Retained) -> None:
        flat, _ = flattened_retained(kept)
        self.staged[: len(flat)] = torch.from_numpy(flat)
        self.kept[: len(flat)].copy_(self.staged[: len(flat)], non_blocking=True)


STEP, LAYERS, HEAD = range(3)


class GraphShape(NamedTuple):
    """A graph that evicts nothing."""

    kind: int  # STEP, LAYERS, or the HEAD after them
    rows: int
    sequences: int
    width: int  # of the window
    block_length: int
    sampled: int = 0  # rows of a head


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
        self.num_captures = 0
        self.capture_seconds = 0.0
        self._record = record or (CudaRecorder() if self.device.type == "cuda" else recompute)
        self._graphs: dict[Key, Captured] = {}
        self._held = torch.zeros(0, dtype=torch.int64, device=self.device)  # every graph's inputs
        self._staged = torch.zeros(0, dtype=torch.int64)  # ... on the host
        self._between: dict[int, Between] = {}  # by the window's width
        # A separate head's input: hidden states, and rows to sample.
        self._states = torch.zeros(0, 0, device=self.device)
        self._picked = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._staged_picks = torch.zeros(0, dtype=torch.int64)

    @property
    def captured_shapes(self) -> set[Key]:
        """Rows, sequences and width of captured steps without eviction."""
        return {key[1:4] for key in self._graphs if key[0] == "step"}

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
        self._bring(self._flatten(padded)[0])
        return self._replayed([step], len(batch.tokens))

    def _is_eager(self, batch: Batch) -> bool:
        num_rows = len(batch.tokens)
        if batch.keys is not None or batch.page_table.shape[1] > self.pages or self.by_entropy:
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
    def prepare(self, policy: Policy, max_batch: int, most: int | None = None) -> None:
        """Capture what a policy's decode steps can need, largest first.

        most: captures of each kind; others are captured on first use, and have room.
        """
        shapes, width, block = reachable(policy, max_batch), policy.width, policy.block_length
        if not shapes:
            return
        rule = policy.eviction if isinstance(policy.eviction, Focus) else None
        masks_alone = policy.unmasking.head == "masks"
        steps = [GraphShape(STEP, *shape, width, block) for shape in shapes]
        longest = self.pages * self.cache.page_size
        prefills = [GraphShape(LAYERS, *x, 1, block) for x in reachable_prefills(policy, max_batch, longest)]
        through_layers = [*prefills, *(shape._replace(kind=LAYERS) for shape in steps if masks_alone)]
        through_layers.sort(key=lambda shape: -shape.rows)
        heads = {bucket(block * n) for n in range(1, min(max_batch, PREFILL_SEQUENCES[-1]) + 1)}
        if masks_alone:
            heads |= {bucket(n) for n in range(1, shapes[0][0] + 1)}
        largest = through_layers[0]._replace(kind=HEAD)
        of_head = [largest._replace(sampled=n) for n in sorted(heads, reverse=True) if n <= largest.rows]
        halves = [] if rule is None else [blank_evicting(self._blank(shape), rule) for shape in steps]
        # Make room before graphs read it.
        room = max(len(self._flatten(b)[0]) for b in [*map(self._blank, [*steps, *prefills]), *halves])
        self._bring(np.zeros(room, np.int64))
        for shape in [*steps[: 0 if masks_alone else most], *through_layers[:most], *of_head[:most]]:
            padded = self._blank(shape)
            if shape.kind == HEAD:
                self._head(padded, shape.sampled)
            elif shape.kind == LAYERS:
                self._layers(padded)
            else:
                self._step(padded)
        if not halves:
            return
        between = self._room(max(rows for rows, _ in shapes), max(sequences for _, sequences in shapes), width)
        for padded in halves[:most]:
            self._half(padded)
        widest = {len(padded.history): padded for padded in reversed(halves)}
        for left, sequences in reachable_after(shapes)[:most]:
            between.bring(blank_retained(left, sequences, width))
            self._rest(widest[sequences], left)

    def _blank(self, shape: GraphShape) -> Batch:
        return blank(shape.rows, shape.sequences, self.pages, shape.width, shape.block_length)

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
        self._bring(self._flatten(padded)[0])
        self._staged_picks[:num] = torch.from_numpy(sampled)
        self._staged_picks[num : bucket(num)] = 0
        self._picked.copy_(self._staged_picks, non_blocking=True)
        return self._replayed(graphs, num)

    def _replay_evicting(self, padded: Batch, batch: Batch) -> Sampled:
        assert batch.evict is not None
        flat, _ = self._flatten(padded)
        half, between = self._half(padded), self._between[padded.listed.shape[1]]
        self._bring(flat)
        clock = DeviceClock(self.device)
        half.replay()
        growth = half.answers[0][: len(batch.evict.masked)].cpu().numpy()  # the only wait
        kept = evicting.keep(batch, growth)
        num = len(kept.rows)
        between.bring(pad_retained(kept, bucket(num), len(padded.history)))
        rest = self._rest(padded, bucket(num))
        rest.replay()
        return replace(self._answered(clock, rest, num), rows=kept.rows, growth=growth.copy())

    def _step(self, padded: Batch) -> Captured:
        def compute(shapes: Shapes) -> tuple[Tensor]:
            return (stacked(self._compute(self._unflatten(self._held, shapes), padded)),)

        return self._captured(_key("step", padded), padded, compute)

    def _layers(self, padded: Batch) -> Captured:
        """A step's layers, up to the head's hidden states."""
        self._make_states(len(padded.tokens))
        states = self._states[: len(padded.tokens)]

        def compute(shapes: Shapes) -> tuple[Tensor]:
            states.copy_(self._hidden(self._unflatten(self._held, shapes), padded))
            return (states,)

        return self._captured(_key("layers", padded), padded, compute)

    def _head(self, padded: Batch, num: int) -> Captured:
        """The head over `num` rows, padding included."""
        self._make_states(len(padded.tokens))

        def compute(shapes: Shapes) -> tuple[Tensor]:
            return (stacked(self._sample(self._states[self._picked[:num]], None)),)

        return self._captured(("head", num), padded, compute)

    def _make_states(self, rows: int) -> None:
        """Make room for `rows` hidden states; drop graphs that read the old."""
        if rows <= len(self._states):
            return
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] not in ("layers", "head")}
        weight = self.model.embedding.weight
        self._states = torch.zeros(rows, self.model.config.hidden, dtype=weight.dtype, device=self.device)
        self._picked = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._staged_picks = torch.zeros(rows, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _half(self, padded: Batch) -> Captured:
        """An evicting step up to the choice; answers masks' growth of importance."""
        rows, (sequences, width) = len(padded.tokens), padded.listed.shape
        between = self._room(rows, sequences, width).half

        def compute(shapes: Shapes) -> tuple[Tensor]:
            inputs, attend = self._unflatten(self._held, shapes), self._attending(padded)
            half, growth = evicting.through_two(self.model, inputs, self._pages, attend)
            for name in Half.__slots__:
                getattr(between, name)[:rows].copy_(getattr(half, name))
            return (growth,)

        return self._captured(_key("half", padded), padded, compute)

    def _rest(self, padded: Batch, left: int) -> Captured:
        """The retained rows, `left` with padding."""
        evict, (sequences, width) = padded.evict, padded.listed.shape
        assert evict is not None
        between = self._room(left, sequences, width)
        shapes_of_kept: Shapes = {
            "rows": (left,), "positions": (left,), "places": (left,), "query_start": (sequences + 1,),
            "seen": (sequences, width),
        }  # fmt: skip

        def compute(shapes: Shapes) -> tuple[Tensor]:
            inputs: Inputs = self._unflatten(self._held, shapes, {"history", "page_table", "listed"})
            kept, attend = self._unflatten(between.kept, shapes_of_kept), self._attending(padded)
            hidden = evicting.finish_rows(self.model, between.half, inputs, kept, self._pages, attend)
            return (stacked(self._sample(hidden, None)),)

        return self._captured(("rest", left, sequences, width, padded.block_length, evict.rule), padded, compute)

    def _room(self, rows: int, sequences: int, width: int) -> Between:
        """Larger room drops the smaller one's graphs."""
        have = self._between.get(width)
        if have is not None and rows <= len(have.half.x) and sequences <= have.sequences:
            return have
        if have is not None:
            rows, sequences = max(rows, len(have.half.x)), max(sequences, have.sequences)
            self._graphs = {
                key: graph for key, graph in self._graphs.items() if key[0] not in ("half", "rest") or key[3] != width
            }
        self._between[width] = Between.of(self.model, rows, sequences, width)
        return self._between[width]

    def _captured(self, key: Key, padded: Batch, compute: Callable[[Shapes], tuple[Tensor]]) -> Captured:
        """Records the graph on first use."""
        if key not in self._graphs:
            flat, shapes = self._flatten(padded)
            self._bring(flat)
            self.num_captures += 1
            begin = time.perf_counter()
            self._graphs[key] = Captured(*self._record(lambda: compute(shapes)))
            self.capture_seconds += time.perf_counter() - begin
        return self._graphs[key]

    def _bring(self, flat: Array) -> None:
        if len(flat) > len(self._held):
            # Graphs read the old tensor.
            self._graphs = {}
            size = max(len(flat), 2 * len(self._held))
            self._held = torch.zeros(size, dtype=torch.int64, device=self.device)
            self._staged = torch.zeros(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        # The host has waited for the last copy's step.
        self._staged[: len(flat)] = torch.from_numpy(flat)
        self._held[: len(flat)].copy_(self._staged[: len(flat)], non_blocking=True)


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


def blank_evicting(batch: Batch, rule: Focus) -> Batch:
    """With an eviction of masks alone."""
    rows = len(batch.tokens)
    return replace(batch, evict=Evict(rule, np.arange(rows), batch.query_start, lambda growth: growth > 0))


def blank_retained(rows: int, sequences: int, width: int) -> Retained:
    """Padding alone."""
    none = np.zeros(0, np.int64)
    return pad_retained(
        Retained(none, none, none, np.zeros(1, np.int64), np.zeros((0, width), np.bool_)), rows, sequences
    )
