"""A request's pages, cut into runs of RUN rows of one KV head: heads may keep different keys.

The attention kernel sees a run as a page and a head as a sequence. Layers share one supply of runs, as they keep
different numbers of keys (MaskKV, full-sequence-diffusion.md 3.3, 3.4).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..engine.policies.dllm_cache import RUN
from .cache import PagedCache

Ints = npt.NDArray[np.int64]


class Runs:
    """The runs of some pages of `all_keys`, to be taken."""

    def __init__(self, cache: PagedCache, pages: Ints) -> None:
        _, page_size, kv_heads, _ = cache.all_keys.shape
        in_page = page_size * kv_heads // RUN
        self._runs = (pages[:, None] * in_page + np.arange(in_page)).reshape(-1)
        self._used = 0

    def take(self, rows: Sequence[int]) -> list[Ints]:
        """Runs for lists of these numbers of rows."""
        taken = []
        for count in rows:
            first, self._used = self._used, self._used + -(-count // RUN)
            # The engine counts every run.
            assert self._used <= len(self._runs), f"{self._used} runs wanted, and there are {len(self._runs)}"
            taken.append(self._runs[first : self._used])
        return taken


def places(runs: Sequence[Ints], num: int) -> Ints:
    """Places of rows 0 to `num` of each list, among one head's rows, [num, lists]."""
    i = np.arange(num)
    return np.stack([own[i // RUN] * RUN + i % RUN for own in runs], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The keys that queries see, each KV head a sequence: the prompt's, then from the next run the response's."""

    table: Tensor  # [kv_heads, runs] int32
    history: Tensor  # [kv_heads] int32, keys of the prompt
    listed: Tensor  # [kv_heads, RUN - 1 + response] bool

    @classmethod
    def of(
        cls, prompt: Sequence[Ints], counts: Ints, response: Sequence[Ints], num: int, device: torch.device
    ) -> "Seen":
        """Each head's first counts[h] prompt rows, and `num` of its response."""
        both = [np.concatenate(lists) for lists in zip(prompt, response, strict=True)]
        table = np.full((len(both), max(1, *map(len, both))), -1, np.int32)
        for row, runs in zip(table, both, strict=True):
            row[: len(runs)] = runs
        column = np.arange(RUN - 1 + num) - (-counts % RUN)[:, None]
        listed = (column >= 0) & (column < num)
        arrays = (table, counts.astype(np.int32), listed)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))
