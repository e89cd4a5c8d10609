"""Tensor parallelism: processes run one model, each with a share of every layer's heads and feed-forward.

Rank 0 plans, keeps page tables and decides commits. The others receive each batch's arrays, compute their share and
hold their part of the KV cache. A layer sums shares after attention and after the feed-forward; logits are computed in
shares of the vocabulary and joined. The twin charges the same (profiler/roofline.py).

Rank 0 sends every call of a forward, which the others repeat: captures and replays are the same in the same order, and
sums match. Between calls they wait at a pipe, without time-out; joint work has one.
"""

import atexit
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..engine.errors import ModelError
from ..kernels.confidence import confidence
from . import weights
from .cache import PagedCache
from .config import ModelConfig
from .config_file import Given
from .evicting import Array
from .forward import ARRAYS, Batch, Forward, Sampled, flat_size
from .graphs import GraphForward, GraphShape, Recorder
from .model import Decoder, Layer
from .sampling import sample
from .shares import Share

STOP, OPEN, OPEN_GRAPHS, COMPUTE, CAPTURE = range(5)  # messages
NAMES = (*ARRAYS, "keys")  # a batch's arrays, in Forward's order
FLAGS = ("block_length", "prefill", "own_head", "whole")  # a batch's other fields
LATEST = timedelta(minutes=10)  # to load weights, and for a joint batch
QUERIES = 1000  # of the device, between looks at the other processes


@dataclass
class Traffic:
    """Data exchanged with the others."""

    reduces: int = 0  # sums
    reduced: int = 0  # bytes summed
    gathered: int = 0  # bytes of others' logits


@dataclass
class Ranks:
    """A model's processes, as one of them sees them."""

    rank: int
    size: int
    config: ModelConfig  # of a share
    traffic: Traffic = field(default_factory=Traffic)
    processes: list[Any] = field(default_factory=list)  # rank 0: the others
    pipes: list[Connection] = field(default_factory=list)  # rank 0: one to each other; others: to rank 0
    folder: Any = None  # rank 0: where they meet
    num_opened: int = 0  # rank 0; others hold the last
    parent: int = field(default_factory=os.getppid)  # others: rank 0

    def close(self) -> None:
        if not self.processes:
            return
        with suppress(OSError, ModelError):  # a dead process receives nothing
            self.send_message(STOP)
        for process in self.processes:
            process.join(5)
            process.terminate()
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group()
        self.processes = []

    def send_message(self, what: int, numbers: Sequence[int] | Array = ()) -> None:
        """Send a message from rank 0; ModelError if another process has ended."""
        message = np.concatenate([[what], numbers]).astype(np.int64).tobytes()
        try:
            for pipe in self.pipes:
                pipe.send_bytes(message)
        except OSError:
            self.check_others()
            raise

    def receive(self) -> tuple[int, Array]:
        """The next message; EOFError if rank 0 has ended."""
        found = np.frombuffer(bytearray(self.pipes[0].recv_bytes()), np.int64)  # writable
        return int(found[0]), found[1:]

    def check_others(self) -> None:
        """ModelError with an ended process's last message."""
        for rank, (process, pipe) in enumerate(zip(self.processes, self.pipes, strict=True), 1):
            process.join(1)  # a failed process ends soon
            if process.exitcode is not None:
                why = f"exit code {process.exitcode}"
                with suppress(OSError, EOFError):
                    why = pipe.recv_bytes().decode() if pipe.poll() else why
                raise ModelError(f"process {rank} of --tp {self.size} has ended: {why}")

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for the device; raises if a process has ended, whose sum would never come."""
        while not is_done():
            for _ in range(QUERIES):
                if is_done():
                    return
            if any(process.exitcode is not None for process in self.processes):
                _abort()
                self.check_others()
            if self.rank and os.getppid() != self.parent:
                _abort()
                raise EOFError

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over all processes."""
        self.traffic.reduces += 1
        self.traffic.reduced += x.numel() * x.element_size()
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Every process's x [rows, n] as [rows, size x n]."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.traffic.gathered += (self.size - 1) * x.numel() * x.element_size()
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)


def _abort() -> None:
    """Abort the sums that the device waits in."""
    if dist.group.WORLD is not None:
        dist.group.WORLD.abort()


class Summed(nn.Module):
    """Its output is summed over all processes."""

    def __init__(self, share: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.share = share
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.sum(self.share(x))


def summed(model: Decoder, ranks: Ranks, whole: ModelConfig) -> Decoder:
    """Make a share's layers sum all shares."""
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.output = Summed(layer.output, ranks)  # type: ignore[assignment]
        if hasattr(layer, "experts"):
            layer.experts = Summed(layer.experts, ranks)  # type: ignore[assignment]
        else:
            layer.down = Summed(layer.down, ranks)  # type: ignore[assignment]
    model.config, model.ranks = whole, ranks
    return model


class Shared(Forward):
    """A share's forward; rank 0 sends its calls to the others' forwards of the same class."""

    _ranks: Ranks
    _number: int  # among the forwards that rank 0 opened

    @property
    def is_open(self) -> bool:
        """Whether the others hold this forward, with its graphs."""
        return self._ranks.num_opened == self._number

    def _open(self, what: int, *numbers: int) -> None:
        self._ranks = self.model.ranks
        if self._ranks.rank == 0:
            self._ranks.num_opened += 1
            self._ranks.send_message(what, numbers)
        self._number = self._ranks.num_opened

    def run(self, batch: Batch) -> Sampled:
        """Run a batch on all processes; ModelError if one has ended."""
        assert batch.evict is None, "no process has all heads"
        assert self.is_open, "the other processes hold another forward, with other graphs"
        if self._ranks.rank == 0:
            self._ranks.send_message(COMPUTE, self._encode(batch))
        try:
            return super().run(batch)
        except RuntimeError:
            self._ranks.check_others()
            raise

    def _encode(self, batch: Batch) -> Array:
        flat, shapes = self._flatten(batch)
        assert list(shapes) == [name for name in NAMES if name in shapes], "the others would read it otherwise"
        header = [int(getattr(batch, name)) for name in FLAGS]
        for name in NAMES:
            shape = shapes.get(name)
            header += [-1, 0, 0] if shape is None else [len(shape), *shape, *(0 for _ in range(2 - len(shape)))]
        return np.concatenate([header, flat])

    def _meanwhile(self) -> None:
        super()._meanwhile()
        if self.device.type == "cuda":
            launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
            launched.record()
            self._ranks.wait(launched.query)

    def _sample(self, hidden: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """As in Forward, with logits in shares."""
        head, size, vocab = self.model.head_weight, self._ranks.size, self.model.config.vocab
        width = -(-vocab // size)
        share = head[self._ranks.rank * width : (self._ranks.rank + 1) * width]
        tokens, sure = [], []
        for low in range(0, max(1, len(hidden)), self.max_num_logits):
            rows = slice(low, low + self.max_num_logits)
            part = nn.functional.pad(hidden[rows] @ share.T, (0, width - len(share)))
            logits = self._ranks.gather(part)[:, :vocab]
            if self._ranks.rank:
                continue
            if self.sampling is not None:
                assert keys is not None, "chance is keyed"
                said = sample(logits.float(), keys[rows], self.sampling)
            else:
                said = confidence(logits.contiguous(), self.temperature)
            tokens.append(said[0])
            sure.append(said[1])
        if self._ranks.rank:
            return hidden[:0, 0].long(), hidden[:0, 0].float()
        return torch.cat(tokens), torch.cat(sure)


def cache_of_share(model: Decoder, num_pages: int, page_size: int) -> PagedCache:
    """A cache for this process's KV heads."""
    weight, ranks = model.embedding.weight, model.ranks
    config = model.config if ranks is None else ranks.config
    return PagedCache(config, num_pages, page_size, str(weight.device), weight.dtype)


def decoded(numbers: Array) -> Batch:
    flags, sizes, flat = np.split(numbers, np.cumsum([len(FLAGS), 3 * len(NAMES)]))
    fields, begin = dict[str, Any](zip(FLAGS, flags.tolist(), strict=True)), 0
    for name, (ndim, *sides) in zip(NAMES, sizes.reshape(-1, 3).tolist(), strict=True):
        if ndim < 0:
            continue
        shape = tuple(sides[:ndim])
        fields[name] = flat[begin : begin + int(np.prod(shape))].reshape(shape)
        begin += flat_size([shape])
    fields["page_table"] = fields["page_table"].astype(np.int32)
    fields["listed"] = fields["listed"].astype(np.bool_)
    if "keys" in fields:
        fields["keys"] = fields["keys"].view(np.uint64)
    return Batch(**fields)


class ParallelForward(Shared):
    def __init__(self, model: Decoder, cache: PagedCache, temperature: float = 1.0, max_num_logits: int = 8192) -> None:
        super().__init__(model, cache, temperature, max_num_logits)
        self._open(OPEN, cache.num_pages, cache.page_size, max_num_logits)


class ParallelGraphForward(Shared, GraphForward):
    """Its graphs include the sums over processes."""

    def __init__(
        self, model: Decoder, cache: PagedCache, temperature: float = 1.0, max_num_logits: int = 8192,
        longest: int | None = None, record: Recorder | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, cache, temperature, max_num_logits, longest, record)
        pages = self.pages * cache.page_size
        self._open(OPEN_GRAPHS, cache.num_pages, cache.page_size, max_num_logits, pages)

    def capture(self, room: int, shapes: Sequence[GraphShape]) -> None:
        assert self.is_open, "the other processes hold another forward, with other graphs"
        if self._ranks.rank == 0:
            self._ranks.send_message(CAPTURE, [room, *(int(number) for shape in shapes for number in shape)])
        super().capture(room, shapes)


@dataclass(frozen=True)
class Source:
    """The model to load, and where processes meet."""

    name: str
    kind: str  # of device
    dtype: torch.dtype
    seed: int
    given: Given
    size: int
    threads: int
    where: str

    @property
    def share(self) -> ModelConfig:
        """The dimensions of a share; ModelError if the model cannot be cut."""
        return Share(weights.config_of(self.name, self.given), 0, self.size).config


def join(
    name: str, device: str, dtype: torch.dtype, seed: int, given: Given, size: int, threads: int | None = None
) -> Decoder:
    """Start the others; returns this process's share. ModelError if the model cannot be cut."""
    folder, kind = tempfile.TemporaryDirectory(prefix="dsim-tp-"), device.split(":")[0]
    where = str(Path(folder.name) / "meet")
    source = Source(name, kind, dtype, seed, given, size, threads or torch.get_num_threads(), where)
    ranks = Ranks(0, size, source.share, folder=folder)
    if kind == "cuda" and torch.cuda.device_count() < size:
        raise ModelError(f"--tp is {size}, and there are {torch.cuda.device_count()} CUDA devices: expected one each")
    context = multiprocessing.get_context("spawn")
    for rank in range(1, size):
        ours, theirs = context.Pipe()
        process = context.Process(target=follow, args=(rank, theirs, source), daemon=True)
        process.start()
        theirs.close()  # the pipe then ends with the process
        ranks.processes.append(process)
        ranks.pipes.append(ours)
    atexit.register(ranks.close)
    return _enter(ranks, source)


def _enter(ranks: Ranks, source: Source) -> Decoder:
    device, backend = source.kind, "gloo"
    if source.kind == "cuda":
        device, backend = f"cuda:{ranks.rank}", "nccl"
        torch.cuda.set_device(ranks.rank)
    dist.init_process_group(
        backend, init_method=f"file://{source.where}", rank=ranks.rank, world_size=ranks.size, timeout=LATEST
    )
    model = weights.load(source.name, device, source.dtype, source.seed, source.given, ranks.rank, ranks.size)
    return summed(model, ranks, weights.config_of(source.name, source.given))


def follow(rank: int, pipe: Connection, source: Source) -> None:
    """The others' main function; rank 0 reports their errors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which ends its step first
    torch.set_num_threads(source.threads)
    ranks = Ranks(rank, source.size, source.share, pipes=[pipe])
    try:
        model = _enter(ranks, source)
        forward: Shared | None = None
        while (message := ranks.receive())[0] != STOP:
            forward = answer(model, forward, *message)
    except EOFError:
        pass
    except (ModelError, RuntimeError) as error:
        with suppress(OSError):
            pipe.send_bytes(str(error).splitlines()[0].encode())
    with suppress(RuntimeError):
        dist.destroy_process_group()


def answer(model: Decoder, forward: Shared | None, what: int, numbers: Array) -> Shared:
    """Repeat a call of rank 0; returns the forward then open."""
    if what == COMPUTE:
        assert forward is not None, "rank 0 opens a forward first"
        forward.run(decoded(numbers))
    elif what == CAPTURE:
        assert isinstance(forward, ParallelGraphForward), "rank 0 opens a forward with graphs first"
        each = numbers[1:].reshape(-1, len(GraphShape._fields)).tolist()
        forward.capture(int(numbers[0]), [GraphShape(*shape) for shape in each])
    else:
        forward = None  # frees memory
        num_pages, page, most, *longest = numbers.tolist()
        cache = cache_of_share(model, num_pages, page)
        if what == OPEN:
            return ParallelForward(model, cache, 1.0, most)
        return ParallelGraphForward(model, cache, 1.0, most, *longest)
    return forward
