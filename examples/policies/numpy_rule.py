"""A rule in plain NumPy, asked once a step: the more requests wait or run, the fewer positions each computes."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from dsim.policy import CACHED, EVERY_STEP, DelayedCache, Granularity, Policy, Preset, Range, Rows, View


@dataclass(frozen=True)
class QueueChunk(Granularity):
    """The largest chunk for up to `calm` requests; beyond, the same number of positions a step shared among all."""

    max_chunk: Annotated[int, Range(2, 32), "the largest chunk, at most the block"] = 32
    calm: Annotated[int, Range(1, 64), "requests, waiting or running, that get the largest chunk"] = 8
    block_length: Annotated[int, Range(2, 64), "tokens of a block, as the checkpoint was trained"] = 32

    sized_by_block = "max_chunk"

    def select(self, view: View, rows: Rows) -> npt.NDArray[np.bool_]:
        load = view.num_waiting + view.num_rows
        chunk = max(2, self.max_chunk * self.calm // max(load, self.calm))
        # The leftmost positions that are not cached yet, within reach.
        left = (rows.status != CACHED) & (np.arange(rows.status.shape[1]) < rows.reach[:, None])
        window: npt.NDArray[np.bool_] = left & (left.cumsum(axis=1) <= chunk)
        return window


POLICY = Preset(Policy("queue-chunk", EVERY_STEP, QueueChunk(), DelayedCache()), main="calm")
