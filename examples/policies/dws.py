"""Shortest remaining blocks first, with ageing (DWS, arXiv 2610.00499): a discipline in plain Python.

dsim replay mine.jsonl --policy vllm-ar --policy vllm-ar,discipline=examples/policies/dws.py:POLICY
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from dsim.policy import Continuous, Discipline, Policy, Preset, Range, View


@dataclass(frozen=True)
class ShortestFirst(Discipline):
    """The queue is in the order of the blocks that each answer is expected to take.

    A request that has waited for `patience` stands as high as one that is a block shorter, so that none starves.
    """

    patience: Annotated[float, Range(0.05, 60), "s of waiting that weigh as much as a block"] = 2.0
    size: Annotated[int, Range(1, 64), "tokens of a block, as lengths are counted"] = 32

    def order(self, view: View) -> npt.NDArray[np.int64]:
        waiting = view.waiting()
        blocks = -(-np.maximum(waiting.estimate - waiting.emitted, 1) // self.size)
        return np.argsort(blocks - waiting.age / self.patience, kind="stable")


POLICY = Preset(
    Policy("dws", Continuous(num_loops=1), discipline=ShortestFirst()),
    main="patience",
    summary="shortest remaining blocks first, with ageing",
    space={"patience": [0.2, 1.0, 5.0, 25.0]},
)
