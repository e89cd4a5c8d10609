"""A chunk capped by age: the longer the oldest request has waited, the fewer positions each row computes."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from dsim.policy import CACHED, EVERY_STEP, DelayedCache, Granularity, Policy, Preset, Range, Rows, View


@dataclass(frozen=True)
class AgeCap(Granularity):
    """The largest chunk, halved for each `patience` that the oldest waiting request has waited."""

    max_chunk: Annotated[int, Range(2, 32), "the largest chunk, at most the block"] = 32
    patience: Annotated[float, Range(0.1, 60), "s of waiting that halve the chunk"] = 4.0
    block_length: Annotated[int, Range(2, 64), "tokens of a block, as the checkpoint was trained"] = 32

    sized_by_block = "max_chunk"

    def select(self, view: View, rows: Rows) -> npt.NDArray[np.bool_]:
        halvings = (view.now - view.waiting().arrival.min(initial=view.now)) // self.patience
        chunk = max(2, int(self.max_chunk / 2**halvings))
        left = (rows.status != CACHED) & (np.arange(rows.status.shape[1]) < rows.reach[:, None])
        window: npt.NDArray[np.bool_] = left & (left.cumsum(axis=1) <= chunk)
        return window


POLICY = Preset(Policy("age-capped", EVERY_STEP, AgeCap(), DelayedCache()), main="patience")
