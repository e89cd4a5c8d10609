"""One forward of the decoder over rows of many sequences: from host arrays to sampled rows' tokens and confidences."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.confidence import confidence_of_hidden
from ..kernels.kv_scatter import kv_scatter
from ..kernels.ragged_paged_attention import ragged_paged_attention
from .cache import PagedCache
from .model import Decoder

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows to compute. Sequence s has the rows query_start[s] to query_start[s + 1]."""

    tokens: Array  # [rows]
    positions: Array  # [rows], absolute
    places: Array  # [rows], where keys and values go: page x page_size + offset
    query_start: Array  # [sequences + 1]
    page_table: npt.NDArray[np.int32]  # [sequences, pages]
    history: Array  # [sequences], keys before the current block: all visible, block-causally
    listed: npt.NDArray[np.bool_]  # [sequences, width], keys of the current block (and the next) that are visible
    block_length: int
    sampled: Array  # rows whose token and confidence are wanted


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What a forward says of its sampled rows."""

    tokens: Array
    confidence: npt.NDArray[np.float32]
    device: float  # s from the first kernel to the last


class Forward:
    """A decoder with its cache, ready to run batches."""

    def __init__(self, model: Decoder, cache: PagedCache, temperature: float = 1.0, max_num_logits: int = 8192) -> None:
        self.model = model
        self.cache = cache
        self.temperature = temperature
        self.max_num_logits = max_num_logits  # rows of logits that may exist at once
        self.device = model.embedding.weight.device

    @torch.inference_mode()
    def run(self, batch: Batch) -> Sampled:
        """Compute a batch, its keys and values written to the cache."""
        cuda = self.device.type == "cuda"
        inputs = self._upload(batch)
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            tokens, confidence = self._compute(inputs, batch.block_length)
            end.record()
            # One copy back, which waits for the device: the host decides what commits.
            both = torch.stack([tokens.to(torch.float64), confidence.to(torch.float64)]).cpu().numpy()
            device = begin.elapsed_time(end) / 1e3
            return Sampled(both[0].astype(np.int64), both[1].astype(np.float32), device)
        clock = time.perf_counter()
        tokens, confidence = self._compute(inputs, batch.block_length)
        return Sampled(tokens.numpy(), confidence.numpy(), time.perf_counter() - clock)

    def _compute(self, inputs: dict[str, Tensor], block_length: int) -> tuple[Tensor, Tensor]:
        cache = self.cache

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            kv_scatter(k, v.contiguous(), keys, values, inputs["places"], check=False)
            return ragged_paged_attention(
                q, keys, values, inputs["page_table"], inputs["query_start"], inputs["positions"], inputs["history"],
                inputs["listed"], block_length, check=False,
            )  # fmt: skip

        hidden = self.model(inputs["tokens"], inputs["positions"], attend)
        return confidence_of_hidden(
            hidden[inputs["sampled"]], self.model.head_weight, self.temperature, self.max_num_logits
        )

    def _upload(self, batch: Batch) -> dict[str, Tensor]:
        """The batch's arrays on the device, by one copy."""
        flat, shapes = self._flatten(batch)
        held = torch.from_numpy(flat)
        if self.device.type == "cuda":
            held = held.pin_memory().to(self.device, non_blocking=True)
        return self._unflatten(held, shapes)

    @staticmethod
    def _flatten(batch: Batch) -> tuple[Array, dict[str, tuple[int, ...]]]:
        """All arrays of a batch one after another, and their shapes."""
        arrays: dict[str, npt.NDArray[Any]] = {
            "tokens": batch.tokens, "positions": batch.positions, "places": batch.places, "sampled": batch.sampled,
            "query_start": batch.query_start, "history": batch.history, "page_table": batch.page_table,
            "listed": batch.listed,
        }  # fmt: skip
        flat = np.concatenate([array.reshape(-1).astype(np.int64) for array in arrays.values()])
        return flat, {name: array.shape for name, array in arrays.items()}

    @staticmethod
    def _unflatten(held: Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The arrays again, each of the type that the kernels want."""
        parts = torch.split(held, [int(np.prod(shape)) for shape in shapes.values()])
        tensors = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        for name in ("positions", "query_start", "history", "page_table"):
            tensors[name] = tensors[name].to(torch.int32)
        tensors["listed"] = tensors["listed"].bool()
        return tensors
