"""FlashInfer's paged attention, if installed, for batches whose rows all see every key of their sequence.

A step is planned once, on the host, and run in each layer. Prompts, and windows with holes, would need a mask with a
bit for each row and key: our kernel computes them. (BatchPrefillWithPagedKVCacheWrapper of flashinfer.prefill; our
pages have its layout NHD.)
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .reference import Sequences

Planned = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k_pages and v_pages of a layer to its output

WORKSPACE = 128 << 20  # bytes, as in its examples
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)


def at_hand() -> Any | None:
    """The module, or None if not installed. Errors of its import pass through."""
    return importlib.import_module("flashinfer") if importlib.util.find_spec("flashinfer") else None


class Seen(NamedTuple):
    """Where each sequence's keys are, in FlashInfer's form: int32 on the host."""

    query_start: Tensor  # [sequences + 1]
    page_start: Tensor  # [sequences + 1]
    pages: Tensor  # [page_start[-1]]
    last: Tensor  # [sequences], keys in the last page


def seen_by_all(sequences: Sequences[npt.NDArray[Any]], page_size: int) -> Seen | None:
    """The keys that rows see; None if a row does not see all keys of its sequence.

    A sequence without keys is padding with an unused result: it sees the pool's first key.
    """
    page_table, query_start, positions, history, listed, block_length = sequences
    num_listed = listed.sum(axis=1)
    keys = history + num_listed
    holes = listed != (np.arange(listed.shape[1]) < num_listed[:, None])
    if holes.any() or (np.repeat(keys - 1, np.diff(query_start)) // block_length > positions // block_length).any():
        return None
    keys = np.maximum(keys, 1)
    pages = -(-keys // page_size)
    held = np.maximum(page_table[np.arange(page_table.shape[1]) < pages[:, None]], 0)
    starts, last = np.concatenate([[0], np.cumsum(pages)]), keys - (pages - 1) * page_size
    return Seen(*(torch.from_numpy(x.astype(np.int32)) for x in (query_start, starts, held, last)))


class Paged:
    """Attention of a model's heads over pages of one size; one planned step at a time."""

    def __init__(
        self, module: Any, heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._module, self._device = module, device
        self._about = {
            "num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim_qk": head_dim, "page_size": page_size,
            "causal": False, "q_data_type": dtype, "kv_data_type": dtype,
        }  # fmt: skip
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        self._eager = module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        self._captured: dict[tuple[int, int, int], Any] = {}

    def plan(self, seen: Seen, most_pages: int | None = None) -> Planned:
        """The attention of a step's layers, until the next plan of the same shape.

        most_pages: of a sequence, in a captured step; its plans go where the graph reads them. None: eager.
        """
        wrapper = self._eager if most_pages is None else self._of_graph(seen, most_pages)
        wrapper.plan(seen.query_start, seen.page_start, seen.pages, seen.last, **self._about)
        return lambda q, k_pages, v_pages: wrapper.run(q.contiguous(), (k_pages, v_pages))

    def _of_graph(self, seen: Seen, most_pages: int) -> Any:
        """The wrapper of a captured shape, with its own arrays."""
        sequences = len(seen.last)
        key = int(seen.query_start[-1]), sequences, most_pages
        if key not in self._captured:
            sizes = (sequences + 1, sequences + 1, sequences * most_pages, sequences)
            held = [torch.zeros(size, dtype=torch.int32, device=self._device) for size in sizes]
            self._captured[key] = self._module.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_cuda_graph=True, qo_indptr_buf=held[0], paged_kv_indptr_buf=held[1],
                paged_kv_indices_buf=held[2], paged_kv_last_page_len_buf=held[3],
            )  # fmt: skip
        return self._captured[key]
