"""One forward over many sequences' rows: host arrays in, sampled tokens and confidences out."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..engine.errors import ModelError
from ..kernels.confidence import confidence_of_hidden
from ..kernels.ragged_paged_attention import Sequences, ragged_paged_attention
from . import evicting
from .cache import PagedCache
from .evicting import Array, Attend, Evict, Floats, Inputs, Retained
from .model import Decoder, Layer, Pages
from .sampling import Sampling, sample_of_hidden

# Dtypes of a step's arrays on the device; others are int64.
KINDS = {
    **dict.fromkeys(("positions", "query_start", "history", "page_table", "masked_start"), torch.int32),
    **dict.fromkeys(("block_query_start", "block_start", "num_kept", "own_pages"), torch.int32),
    **dict.fromkeys(("listed", "visible"), torch.bool),
    **dict.fromkeys(("temperature", "uniform"), torch.float64),
}

Shapes = dict[str, tuple[int, ...]]

ARRAYS = ("query_start", "history", "page_table", "listed", "tokens", "positions", "places", "sampled")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows to compute; sequence s has query_start[s] to query_start[s + 1]."""

    tokens: Array  # [rows]
    positions: Array  # [rows], absolute
    places: Array  # [rows], of keys and values: page x page_size + offset
    query_start: Array  # [sequences + 1]
    page_table: npt.NDArray[np.int32]  # [sequences, pages]
    history: Array  # [sequences], keys before the current block, all visible
    listed: npt.NDArray[np.bool_]  # [sequences, width], visible keys of this block and the next
    block_length: int
    sampled: Array  # rows that get a token
    evict: Evict | None = None  # None: no eviction
    prefill: bool = False
    own_head: bool = False  # only sampled rows pass the head, in their own graph
    uniform: npt.NDArray[np.float64] | None = None  # [sampled], for drawn tokens; None: the likeliest
    spare: int = 0  # last sequences, only for padding rows

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The device's arrays, by sequence first: their places do not depend on rows."""
        arrays: dict[str, npt.NDArray[Any]] = {name: getattr(self, name) for name in ARRAYS}
        if self.evict is not None:
            arrays |= {"masked": self.evict.masked, "masked_start": self.evict.masked_start}
        if self.uniform is not None:
            arrays["uniform"] = self.uniform
        return arrays


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    tokens: Array
    confidence: npt.NDArray[np.float32]
    device: float  # s, first kernel to last
    rows: Array | None = None  # retained rows of the batch; None: all sampled
    growth: Floats | None = None  # [M], of masks' importance

    def __post_init__(self) -> None:
        if num := int(np.isnan(self.confidence).sum()):
            fault = f"{num} of {len(self.confidence)} rows have no finite logit, or a NaN"
            raise ModelError(f"{fault}: the weights or the device are damaged")


class DeviceClock:
    """Starts when created. Reads CUDA events, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._took = time.perf_counter()
        if self._cuda:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._begin.record()

    def stop(self) -> None:
        """Mark the end, after all launches so far."""
        if self._cuda:
            self._end.record()
        self._took = time.perf_counter() - self._took

    def seconds(self) -> float:
        """Waits for the device."""
        if self._cuda:
            self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3 if self._cuda else self._took


class Forward:
    """A decoder with its cache."""

    def __init__(self, model: Decoder, cache: PagedCache, temperature: float = 1.0, max_num_logits: int = 8192) -> None:
        self.model = model
        self.cache = cache
        self.temperature = temperature
        self.max_num_logits = max_num_logits  # rows of logits at once
        self.device = model.embedding.weight.device
        self.sampling: Sampling | None = None  # None: the likeliest tokens
        self.by_entropy = False  # confidence: negative entropy, not probability
        self.meanwhile: list[Callable[[], object]] = []  # called once a step, while the device works

    @property
    def attended(self) -> tuple[Tensor, Tensor]:
        """One layer's KV, for attention."""
        return self.cache.keys[0], self.cache.values[0]

    @torch.inference_mode()
    def run(self, batch: Batch) -> Sampled:
        """Compute a batch; write its KV."""
        inputs = self.inputs(batch.arrays())
        if batch.evict is not None:
            return self._run_evicting(inputs, batch)
        return self._timed(lambda: self._answers(inputs, batch))

    def _timed(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> Sampled:
        clock = DeviceClock(self.device)
        answers = compute()
        clock.stop()
        self._meanwhile()
        if self.device.type == "cuda":
            # One copy, which waits for the device.
            pair = stacked(answers).cpu().numpy()
            tokens, confidence = pair[0].astype(np.int64), pair[1].astype(np.float32)
        else:
            tokens, confidence = (answer.numpy() for answer in answers)
        return Sampled(tokens, confidence, clock.seconds())

    def _meanwhile(self) -> None:
        """Host work between launch and answers."""
        for work in self.meanwhile:
            work()

    def _run_evicting(self, inputs: Inputs, batch: Batch) -> Sampled:
        assert batch.evict is not None
        attend = self._attending(batch)
        retained, growth = list[Retained](), list[Floats]()

        def compute() -> tuple[Tensor, Tensor]:
            half, grown = evicting.through_two(self.model, inputs, self._pages, attend)
            growth.append(grown.cpu().numpy())  # waits for the device
            retained.append(evicting.keep(batch, growth[0]))
            remaining = self.inputs(retained[0].arrays())
            hidden = evicting.finish_rows(self.model, half, inputs, remaining, self._pages, attend)
            uniform = inputs.get("uniform")
            return self._sample(hidden, None if uniform is None else uniform[remaining["rows"]])

        return replace(self._timed(compute), rows=retained[0].rows, growth=growth[0])

    def _answers(self, inputs: Inputs, batch: Batch) -> tuple[Tensor, Tensor]:
        """Tokens and confidences."""
        hidden = self._hidden(inputs, batch)
        return self._sample(hidden[inputs["sampled"]], inputs.get("uniform"))

    def _hidden(self, inputs: Inputs, batch: Batch) -> Tensor:
        """Final hidden states of all rows, normed."""
        x, cos, sin = self.model.enter(inputs["tokens"], inputs["positions"])
        added = None
        for layer in cast(Iterable[Layer], self.model.layers):
            x, q = layer.project_to(self._pages(layer.index, inputs), x, cos, sin, added)
            x, added = layer.finish(x, self._attend(layer.index, q, inputs, batch))
        return self.model.leave(x, added)

    def _attending(self, batch: Batch) -> Attend:
        return partial(self._attend, batch=batch)

    def _pages(self, layer: int, inputs: Inputs) -> Pages:
        return Pages(self.cache.keys[layer], self.cache.values[layer], inputs["places"])

    def _attend(self, layer: int, q: Tensor, inputs: Inputs, batch: Batch) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        sequences = sequences_of(inputs, batch.block_length, batch.spare)
        return ragged_paged_attention(q, keys, values, sequences)

    def _sample(self, hidden: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens and confidences; uniform [rows]: to draw."""
        if self.sampling is not None or self.by_entropy:
            head, sampling = self.model.head_weight, self.sampling
            return sample_of_hidden(hidden, head, uniform, sampling, self.max_num_logits, self.by_entropy)
        return confidence_of_hidden(hidden, self.model.head_weight, self.temperature, self.max_num_logits)

    def inputs(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Inputs:
        """Arrays on the device, copied at once."""
        flat, shapes = flattened(arrays)
        numbers = torch.from_numpy(flat)
        if self.device.type == "cuda":
            numbers = numbers.pin_memory().to(self.device, non_blocking=True)
        return unflattened(numbers, shapes)


def stacked(answers: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack([answer.to(torch.float64) for answer in answers])


def sequences_of(inputs: Inputs, block_length: int, spare: int = 0) -> Sequences[Tensor]:
    x = inputs
    return Sequences(x["page_table"], x["query_start"], x["positions"], x["history"], x["listed"], block_length, spare)


def flattened(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[Array, Shapes]:
    """Join arrays, each aligned to 16 bytes, which kernels are compiled for; and their shapes."""
    sizes = [array.size + array.size % 2 for array in arrays.values()]
    flat, begin = np.zeros(sum(sizes), np.int64), 0
    for array, size in zip(arrays.values(), sizes, strict=True):
        flat[begin : begin + array.size].view(array.dtype if array.itemsize == 8 else np.int64)[:] = array.reshape(-1)
        begin += size
    return flat, {name: array.shape for name, array in arrays.items()}


def unflattened(numbers: Tensor, shapes: Shapes, names: Collection[str] | None = None) -> Inputs:
    """The arrays that were joined, or those of `names`, in kernels' dtypes."""
    inputs, begin = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        if names is None or name in names:
            array, kind = numbers[begin : begin + size].view(shape), KINDS.get(name, torch.int64)
            inputs[name] = array.view(kind) if kind == torch.float64 else array.to(kind)
        begin += size + size % 2
    return inputs
