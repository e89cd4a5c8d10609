"""One forward over many sequences' rows: host arrays in, sampled tokens and confidences out."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..engine.errors import ModelError
from ..kernels.confidence import confidence_of_hidden
from ..kernels.qk_norm_rope import Pages, Turns
from ..kernels.ragged_paged_attention import Sequences, ragged_paged_attention
from . import evicting
from .cache import PagedCache
from .evicting import Array, Evict, Floats, Inputs, Retained
from .model import Decoder, Layer

# Dtypes of a step's arrays on the device; others are int64.
KINDS = {
    **dict.fromkeys(("positions", "query_start", "history", "page_table", "masked_start"), torch.int32),
    **dict.fromkeys(("block_query_start", "block_start", "num_kept", "own_pages"), torch.int32),
    **dict.fromkeys(("table True", "table False"), torch.int32),
    "listed": torch.bool,
    **dict.fromkeys(("temperature", "uniform"), torch.float64),
}

Shapes = dict[str, tuple[int, ...]]

ARRAYS = ("query_start", "history", "page_table", "listed", "tokens", "positions", "places")


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
    sampled: Array  # rows that pass the head
    evict: Evict | None = None  # None: no eviction
    prefill: bool = False
    spare: int = 0  # last sequences, only for padding rows

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The layers' arrays."""
        arrays: dict[str, npt.NDArray[Any]] = {name: getattr(self, name) for name in ARRAYS}
        if self.evict is not None:
            arrays |= {"masked": self.evict.masked, "masked_start": self.evict.masked_start}
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
        if not self._cuda:
            return self._took
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


class Forward:
    """A decoder with its cache."""

    def __init__(self, model: Decoder, cache: PagedCache, temperature: float = 1.0, max_num_logits: int = 8192) -> None:
        self.model = model
        self.layers = cast(list[Layer], list(model.layers))
        self.cache = cache
        self.temperature = temperature
        self.max_num_logits = max_num_logits  # rows of logits at once
        self.device = model.embedding.weight.device
        self.by_entropy = False  # confidence: negative entropy, not probability
        self.meanwhile: list[Callable[[], object]] = []  # called once a step, while the device works

    @property
    def attended(self) -> tuple[Tensor, Tensor]:
        """One layer's KV, for attention."""
        return self.cache.keys[0], self.cache.values[0]

    @torch.inference_mode()
    def run(self, batch: Batch) -> Sampled:
        """Compute a batch; write its KV."""
        if batch.evict is None:
            return self.read(*self.states(batch))
        hidden, clock, retained, growth = self.states_evicting(batch)
        return replace(self.read(hidden, clock), rows=retained.rows, growth=growth)

    def states(self, batch: Batch) -> tuple[Tensor, DeviceClock]:
        """Normed final hidden states of the sampled rows, and a clock that started with the device's work."""
        inputs = self.inputs(batch.arrays() | {"sampled": batch.sampled})
        clock = DeviceClock(self.device)
        return self.hidden(inputs, batch)[inputs["sampled"]], clock

    def states_evicting(self, batch: Batch) -> tuple[Tensor, DeviceClock, Retained, Floats]:
        """`states` of the retained rows, and masks' growth of importance."""
        inputs = self.inputs(batch.arrays())
        clock = DeviceClock(self.device)
        half, grown = evicting.through_two(self, inputs, batch)
        growth = grown.cpu().numpy()  # waits for the device
        retained = evicting.keep(batch, growth)
        inputs |= self.inputs(retained.arrays())
        return evicting.finish_rows(self, half, inputs, batch), clock, retained, growth

    def read(self, hidden: Tensor, clock: DeviceClock) -> Sampled:
        """Tokens and confidences of hidden states [rows, hidden]."""
        answers = self._head(hidden)
        clock.stop()
        for work in self.meanwhile:
            work()
        # One copy, which waits for the device.
        tokens, confidence = torch.stack([answer.double() for answer in answers]).cpu().numpy()
        return Sampled(tokens.astype(np.int64), confidence.astype(np.float32), clock.seconds())

    def _head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.by_entropy:
            return entropy_of_hidden(hidden, self.model.head_weight, self.max_num_logits)
        return confidence_of_hidden(hidden, self.model.head_weight, self.temperature, self.max_num_logits)

    def hidden(self, inputs: Inputs, batch: Batch) -> Tensor:
        """Final hidden states of all rows, normed."""
        return self.through(self.layers, *self.model.enter(inputs["tokens"], inputs["positions"]), inputs, batch)

    def through(self, layers: Iterable[Layer], x: Tensor, turns: Turns, inputs: Inputs, batch: Batch) -> Tensor:
        """The last layers' final hidden states, normed."""
        for layer in layers:
            q = layer.project_to(self.pages_of(layer.index, inputs), x, turns)
            x = layer.finish(x, self.attend(layer.index, q, inputs, batch))
        return self.model.norm(x)  # type: ignore[no-any-return]

    def pages_of(self, layer: int, inputs: Inputs) -> Pages:
        return Pages(self.cache.keys[layer], self.cache.values[layer], inputs["places"])

    def attend(self, layer: int, q: Tensor, inputs: Inputs, batch: Batch) -> Tensor:
        sequences = sequences_of(inputs, batch.block_length, batch.spare)
        return ragged_paged_attention(q, self.cache.keys[layer], self.cache.values[layer], sequences)

    def inputs(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Inputs:
        return on_device(arrays, self.device)


def entropy_of_hidden(hidden: Tensor, head: Tensor, max_num_logits: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of hidden [rows, h] @ head.T, and negative entropies, in nats (Dream's "entropy")."""
    tokens = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    certainty = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for low in range(0, len(hidden), max_num_logits):
        rows = slice(low, low + max_num_logits)
        probabilities = (hidden[rows] @ head.T).float().softmax(dim=-1)
        tokens[rows] = probabilities.argmax(dim=-1)
        certainty[rows] = probabilities.xlogy(probabilities).sum(dim=-1)
    return tokens, certainty


def sequences_of(inputs: Inputs, block_length: int, spare: int = 0) -> Sequences[Tensor]:
    names = ("page_table", "query_start", "positions", "history", "listed")
    return Sequences(**{name: inputs[name] for name in names}, block_length=block_length, spare=spare)


def on_device(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device) -> Inputs:
    """Arrays on a device, copied at once."""
    flat, shapes = flattened(arrays)
    numbers = torch.from_numpy(flat)
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    return unflattened(numbers, shapes)


def flattened(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[Array, Shapes]:
    """Join arrays, each aligned to 16 bytes, which kernels are compiled for; and their shapes."""
    sizes = [array.size + array.size % 2 for array in arrays.values()]
    flat, begin = np.zeros(sum(sizes), np.int64), 0
    for array, size in zip(arrays.values(), sizes, strict=True):
        if array.dtype == np.float64:
            array = array.view(np.int64)
        flat[begin : begin + array.size] = array.reshape(-1)
        begin += size
    return flat, {name: array.shape for name, array in arrays.items()}


def unflattened(numbers: Tensor, shapes: Shapes) -> Inputs:
    """The arrays that were joined, in kernels' dtypes."""
    inputs, begin = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        array, kind = numbers[begin : begin + size].view(shape), KINDS.get(name, torch.int64)
        if kind == torch.float64:
            inputs[name] = array.view(kind)
        else:
            inputs[name] = array.to(kind)
        begin += size + size % 2
    return inputs
