"""The twin that most tests of the server serve."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsim.engine.latency import LatencyModel
from dsim.profiler.profile import save
from dsim.results.world import World
from dsim.serve.open import Behind, open_twin

from ..worlds import TOY_MODEL, toy_profile
from .serving import CHUNK, FAST


@pytest.fixture
def twin(tmp_path: Path) -> Callable[..., Behind]:
    """Opens a twin of a toy profile, ready to serve."""

    def opened(
        latency: LatencyModel = FAST, *, policy: str = CHUNK, append: Any = None, speed: float = 1.0, **world: Any
    ) -> Behind:
        save(dataclasses.replace(toy_profile(TOY_MODEL, latency), name="toy"), tmp_path / "toy.json", force=True)
        found = World(trace="", policy=policy, profile=str(tmp_path / "toy.json"), **world)
        return open_twin(found, append=append, speed=speed)

    return opened
