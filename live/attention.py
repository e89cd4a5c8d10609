"""Choose the attention kernel of whole-block steps: ours, or FlashInfer's where it is faster.

Both are timed when the model is opened, the host's planning included; FlashInfer's must give the same result. A run's
settings record times and choice.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..engine.latency import bucket
from ..files.read import cut_words
from ..files.write import tell
from ..kernels.ragged_paged_attention import Sequences, ragged_paged_attention
from ..kernels.ragged_paged_attention.flashinfer import (
    DTYPES,
    HEAD_DIMS,
    Paged,
    Planned,
    at_hand,
    seen_by_all,
)
from .clock import DeviceClock
from .config import ModelConfig
from .model import Decoder

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)  # numbers of sequences timed
CONTEXT = 1024  # keys before a block
PAGE = 64  # tokens
POOL = 1024  # pages of all sequences: more than the device's cache holds
REPEATS = 10
# Each kernel may round the sum and its weights by half a unit of bf16.
NEAR = 2**-7

Time = Callable[[Callable[[], object]], float]  # s that a call takes
Record = Callable[[Callable[[], tuple[Tensor, ...]]], tuple[Callable[[], None], tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Timed:
    """A step's attention in all layers (s)."""

    sequences: int
    ours: float
    flashinfer: float  # with the host's planning


@dataclass
class Attention:
    """FlashInfer's attention for a model, and where it was faster."""

    module: Any
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    timed: list[Timed] = field(default_factory=list)
    refused: str | None = None  # why ours is always used
    _paged: dict[int, Paged] = field(default_factory=dict)  # by page size

    def plan(self, of: Sequences[npt.NDArray[Any]], page_size: int, most_pages: int | None = None) -> Planned | None:
        """FlashInfer's plan for whole blocks; None: use ours."""
        if not self.takes(len(of.history)):
            return None
        seen = seen_by_all(of, page_size)
        return None if seen is None else self.paged(page_size).plan(seen, most_pages)

    def takes(self, sequences: int) -> bool:
        """Whether FlashInfer was faster at the next larger timed number, or the largest."""
        size = min(bucket(sequences), SEQUENCES[-1])
        return self.refused is None and any(t.sequences == size and t.flashinfer < t.ours for t in self.timed)

    def paged(self, page_size: int) -> Paged:
        if page_size not in self._paged:
            c = self.config
            self._paged[page_size] = Paged(
                self.module, c.heads, c.kv_heads, c.head_dim, page_size, self.dtype, self.device
            )
        return self._paged[page_size]

    @property
    def settings(self) -> dict[str, Any]:
        version = str(getattr(self.module, "__version__", "unknown"))
        if self.refused is not None:
            return {"flashinfer": version, "refused": self.refused}
        steps = [
            {"sequences": t.sequences, "ours_us": round(1e6 * t.ours, 1), "flashinfer_us": round(1e6 * t.flashinfer, 1)}
            for t in self.timed
        ]
        return {"flashinfer": version, "taken_at": [n for n in SEQUENCES if self.takes(n)], "steps": steps}


def attention_of(model: Decoder, record: Record | None = None) -> Attention | None:
    """`choose` on a CUDA device; None without FlashInfer.

    If its import fails, one line on stderr says so.
    """
    weight = model.embedding.weight
    try:
        module = at_hand()
    except Exception as error:  # its build does not fit this CUDA or PyTorch
        why = cut_words(f"{type(error).__name__}: {error}")
        tell(f"FlashInfer is installed and cannot be imported ({why}): attention is dsim's own kernel")
        return None
    if module is None:
        return None
    return choose(module, model.config, weight.dtype, weight.device, device_seconds, record)


@torch.inference_mode()
def choose(
    module: Any, config: ModelConfig, dtype: torch.dtype, device: torch.device, time_of: Time,
    record: Record | None = None,
) -> Attention:  # fmt: skip
    """Time both. record: captures launches, as steps will; None: steps are eager."""
    found = Attention(module, config, dtype, device)
    if config.head_dim not in HEAD_DIMS or dtype not in DTYPES:
        found.refused = f"heads of {config.head_dim} in {dtype}: expected one of {HEAD_DIMS} in bf16 or fp16"
        return found
    try:
        for sequences in SEQUENCES:
            found.timed.append(_time(found, sequences, time_of, record))
    except Exception as error:  # any error of FlashInfer: use ours
        found.refused = (str(error) or type(error).__name__).splitlines()[0]
    return found


def device_seconds(call: Callable[[], object]) -> float:
    """Mean s of a warm call on the current CUDA device."""
    for _ in range(3):
        call()
    clock = DeviceClock(torch.device("cuda"))
    for _ in range(REPEATS):
        call()
    clock.stop()
    return clock.seconds() / REPEATS


def _blocks(block_length: int, num: int) -> Sequences[npt.NDArray[Any]]:
    """`num` blocks after CONTEXT keys each, on random pages."""
    pages = -(-(CONTEXT + block_length) // PAGE)
    order = np.random.default_rng(num).permutation(np.arange(-(-num * pages // POOL) * POOL) % POOL)
    history = np.full(num, CONTEXT // block_length * block_length)
    return Sequences(
        page_table=order[: num * pages].reshape(num, pages).astype(np.int32),
        query_start=np.arange(num + 1) * block_length,
        positions=(history[:, None] + np.arange(block_length)).reshape(-1),
        history=history,
        listed=np.ones((num, block_length), np.bool_),
        block_length=block_length,
    )


def _time(found: Attention, sequences: int, time_of: Time, record: Record | None) -> Timed:
    config, of = found.config, _blocks(found.config.block_length, sequences)
    chance = torch.Generator(found.device).manual_seed(sequences)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance, device=found.device).to(found.dtype)

    q = normal(sequences * config.block_length, config.heads, config.head_dim)
    keys, values = (normal(POOL, PAGE, config.kv_heads, config.head_dim) for _ in range(2))
    arrays = (torch.from_numpy(x).to(found.device, torch.bool if x.dtype == np.bool_ else torch.int32) for x in of[:5])
    table, start, positions, history, listed = arrays
    on_device = Sequences(table, start, positions, history, listed, of.block_length)
    seen = seen_by_all(of, PAGE)
    assert seen is not None, "whole blocks"
    paged, most = found.paged(PAGE), None if record is None else of.page_table.shape[1]
    planned = paged.plan(seen, most)

    def ours() -> tuple[Tensor]:
        return (ragged_paged_attention(q, keys, values, on_device, check=False),)

    def theirs() -> tuple[Tensor]:
        return (planned(q, keys, values),)

    expected, read = ours()[0].float(), theirs()[0].float()
    if not torch.allclose(read, expected, rtol=NEAR, atol=NEAR):
        far = float((read - expected).abs().max())
        raise ValueError(
            f"FlashInfer reads values that differ by {far:.3g} from our kernel's, expected at most {NEAR:.3g}"
        )
    launches: list[Callable[[], object]] = [ours, theirs]
    if record is not None:
        launches = [record(launch)[0] for launch in (ours, theirs)]
    mine, other = (config.layers * time_of(launch) for launch in launches)
    return Timed(sequences, mine, other + time_of(lambda: paged.plan(seen, most)))
