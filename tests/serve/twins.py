"""Twins of a toy, ready to serve."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsim.engine.latency import LatencyModel
from dsim.profiler.profile import save
from dsim.results.scenario import Scenario
from dsim.serve.open import Behind, open_twin

from ..worlds import TOY_MODEL, toy_profile

FAST = LatencyModel(((0.0, 0.002), (16.0, 0.003), (32.0, 0.004)), 0.0)
SLOW = LatencyModel(((0.0, 0.2), (16.0, 0.2), (32.0, 0.2)), 0.0)
CHUNK = "chunk:2,block_length=4,max_batch=4,num_pages=64,page_size=8"


def opener(folder: Path) -> Callable[..., Behind]:
    """A function that opens a twin of a toy profile, which lies in the folder."""

    def opened(
        latency: LatencyModel = FAST, *, policy: str = CHUNK, append: Any = None,
        speed: float = 1.0, metrics_as: str | None = None, **scenario: Any,
    ) -> Behind:  # fmt: skip
        save(dataclasses.replace(toy_profile(TOY_MODEL, latency), name="toy"), folder / "toy.json", force=True)
        found = Scenario(trace="", policy=policy, profile=str(folder / "toy.json"), **scenario)
        return open_twin(found, append=append, speed=speed, metrics_as=metrics_as)

    return opened
