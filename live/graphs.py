"""A forward whose decode steps are captured CUDA graphs, one a padded shape: launches cost almost nothing.

All share one memory pool: answers are read before the next launch. Without CUDA a graph recomputes into the same
tensors, so that tests check padding and aliasing. Prefills are eager, and steps that evict, as FOCUS's published runs.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..engine.policy import Policy
from .cache import PagedCache
from .clock import DeviceClock
from .evicting import Array
from .forward import Batch, Forward, Sampled, arrays_of, flattened, stacked, unflattened
from .model import Decoder
from .padding import MAX_ROWS, pad, padded_shape, reachable

Key = tuple[int, ...]
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


class Held:
    """Every graph's inputs on the device, and on the host."""

    def __init__(self, device: torch.device) -> None:
        self.inputs = torch.zeros(0, dtype=torch.int64, device=device)
        self._staged = torch.zeros(0, dtype=torch.int64)

    def bring(self, flat: Array) -> bool:
        """Copy inputs to the device; true: to a larger tensor, and captured graphs read the old one."""
        moves = len(flat) > len(self.inputs)
        if moves:
            size, device = max(len(flat), 2 * len(self.inputs)), self.inputs.device
            self.inputs = torch.zeros(size, dtype=torch.int64, device=device)
            self._staged = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        # The host has waited for the last copy's step.
        self._staged[: len(flat)] = torch.from_numpy(flat)
        self.inputs[: len(flat)].copy_(self._staged[: len(flat)], non_blocking=True)
        return moves


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
        self._held = Held(self.device)

    @property
    def captured_shapes(self) -> set[Key]:
        """Rows, sequences and width of captured steps."""
        return {key[:3] for key in self._graphs}

    @torch.inference_mode()
    def run(self, batch: Batch) -> Sampled:
        if self._is_eager(batch):
            return super().run(batch)
        shape = padded_shape(len(batch.tokens), len(batch.history))
        padded = pad(batch, *shape, self.pages, batch.listed.shape[1])
        step = self._step(padded)
        self._bring(flattened(arrays_of(padded)))
        clock = DeviceClock(self.device)
        step.replay()
        clock.stop()
        self._meanwhile()
        tokens, confidence = step.answers[0][:, : len(batch.tokens)].cpu().numpy()
        return Sampled(tokens.astype(np.int64), confidence.astype(np.float32), clock.seconds())

    def _is_eager(self, batch: Batch) -> bool:
        drawn = batch.keys is not None or self.by_entropy
        large = batch.page_table.shape[1] > self.pages or len(batch.tokens) > MAX_ROWS
        return batch.prefill or batch.evict is not None or drawn or large

    @torch.inference_mode()
    def prepare(self, policy: Policy, max_batch: int, most: int | None = None) -> None:
        """Capture what a policy's decode steps can need, largest first.

        most: captures; other steps are captured on first use, and have room.
        """
        steps = [blank(*shape, self.pages, policy.width, policy.block_length) for shape in reachable(policy, max_batch)]
        # Make room before graphs read it.
        self._bring(np.zeros(max((len(flattened(arrays_of(step))) for step in steps), default=0), np.int64))
        for padded in steps[:most]:
            self._step(padded)

    def _step(self, padded: Batch) -> Captured:
        """The graph of a padded batch, recorded on first use."""
        rows, (sequences, width) = len(padded.tokens), padded.listed.shape
        key = rows, sequences, width, padded.block_length
        if key not in self._graphs:
            arrays = arrays_of(padded)
            self._bring(flattened(arrays))

            def compute() -> Answers:
                return (stacked(self._answers(unflattened(self._held.inputs, arrays), padded)),)

            self.num_captures += 1
            begin = time.perf_counter()
            self._graphs[key] = Captured(*self._record(compute))
            self.capture_seconds += time.perf_counter() - begin
        return self._graphs[key]

    def _bring(self, flat: Array) -> None:
        if self._held.bring(flat):
            self._graphs = {}


def blank(rows: int, sequences: int, pages: int, width: int, block_length: int) -> Batch:
    """A decode batch that writes and sees nothing."""
    zeros = np.zeros(rows, np.int64)
    return Batch(
        tokens=zeros, positions=zeros, places=zeros - 1, query_start=np.arange(sequences + 1) * rows // sequences,
        page_table=np.full((sequences, pages), -1, np.int32), history=np.zeros(sequences, np.int64),
        listed=np.zeros((sequences, width), np.bool_), block_length=block_length, sampled=np.arange(rows), spare=1,
    )  # fmt: skip
