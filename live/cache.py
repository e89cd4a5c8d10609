"""The paged KV cache: tensors on the device, and each sequence's pages on the host."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..engine.errors import ModelError
from .config import ModelConfig

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PageShape:
    layers: int
    kv_heads: int
    head_dim: int


class PagedCache:
    """Keys and values in pages, [pages, page_size, kv_heads, head_dim] a layer.

    num_scratch: pages that layers share, for keys that no later step reads. Page p of layer l is number l * num_pages +
    p of `all_keys` and `all_values`; scratch pages come last.
    """

    def __init__(
        self,
        config: ModelConfig | PageShape,
        num_pages: int,
        page_size: int,
        device: str,
        dtype: torch.dtype,
        num_scratch: int = 0,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        pool = (config.layers, num_pages)
        self.scratch = config.layers * num_pages  # first scratch page
        shape = (self.scratch + num_scratch, page_size, config.kv_heads, config.head_dim)
        size = 2 * int(np.prod(shape)) * dtype.itemsize
        try:
            # Not torch.empty: 0 times NaN is NaN, and masked keys have weight 0.
            self.all_keys: Tensor = torch.zeros(shape, dtype=dtype, device=device)
            self.all_values: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise ModelError(
                f"{num_pages} KV pages of {page_size} tokens take {size / 1e9:.1f} GB, which {device} does not have: "
                f"set num_pages or max_batch lower ({str(error).splitlines()[0]})"
            ) from None
        # [layers, pages, page_size, kv_heads, head_dim]
        self.keys, self.values = (x[: self.scratch].view(*pool, *shape[1:]) for x in (self.all_keys, self.all_values))
        self._free = list(range(num_pages - 1, -1, -1))
        self.table: Ints = np.full((16, 4), -1, np.int32)  # [slots, pages of a sequence]
        self._count: Ints = np.zeros(16, np.int32)  # pages a slot holds

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, slots: Ints, tokens: npt.NDArray[np.int64]) -> None:
        need = -(-tokens // self.page_size)
        self._grow(int(slots.max()) + 1, int(need.max()))
        for i in np.flatnonzero(need > self._count[slots]).tolist():
            slot = int(slots[i])
            num = int(need[i] - self._count[slot])
            # The engine counts every page and would have preempted.
            assert num <= len(self._free), f"{num} pages wanted, {len(self._free)} of {self.num_pages} free"
            pages = [self._free.pop() for _ in range(num)]
            self.table[slot, self._count[slot] : self._count[slot] + num] = pages
            self._count[slot] += num

    def release(self, slot: int) -> None:
        self.release_before(slot, int(self._count[slot]) * self.page_size)
        self._count[slot] = 0

    def release_before(self, slot: int, position: int) -> None:
        """Free a slot's pages that end at or before `position`, out of every window."""
        pages = self.table[slot, : min(position // self.page_size, int(self._count[slot]))]
        self._free.extend(pages[pages >= 0].tolist()[::-1])
        pages[:] = -1

    def fill(self, seed: int) -> None:
        """Fill all pages with normal numbers: multiplying zeros draws less power."""
        chance = torch.Generator(self.all_keys.device).manual_seed(seed)
        for pages in (self.all_keys, self.all_values):
            pages.normal_(generator=chance)

    def clear(self) -> None:
        for slot in np.flatnonzero(self._count).tolist():
            self.release(slot)

    def places(self, slots: Ints, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where keys and values are stored, page x page_size + offset, [rows]."""
        pages = self.table[slots, positions // self.page_size]
        assert (pages >= 0).all(), "a position without a page"
        return pages.astype(np.int64) * self.page_size + positions % self.page_size

    def tables(self, slots: Ints, tokens: npt.NDArray[np.int64]) -> Ints:
        """[slots, pages]."""
        return self.table[slots, : max(1, int(-(-tokens.max(initial=0) // self.page_size)))]

    def _grow(self, slots: int, pages: int) -> None:
        have = self.table.shape
        if slots <= have[0] and pages <= have[1]:
            return
        table = np.full((max(slots, 2 * have[0]), max(pages, 2 * have[1])), -1, np.int32)
        table[: have[0], : have[1]] = self.table
        count = np.zeros(len(table), np.int32)
        count[: have[0]] = self._count
        self.table, self._count = table, count
