"""The twin that most tests of the server serve."""

from dataclasses import replace
from typing import Any

import pytest

from dsim.engine.latency import LatencyModel
from dsim.profiler.profile import save
from dsim.results.world import World
from dsim.serve.open import Behind, open_twin

from ..worlds import TOY_MODEL, toy_profile
from .serving import CHUNK, FAST, Twin


@pytest.fixture
def twin() -> Twin:
    """Opens a twin of a toy profile, ready to serve."""

    def opened(
        latency: LatencyModel = FAST, *, policy: str = CHUNK, append: Any = None, speed: float = 1.0, **world: Any
    ) -> Behind:
        save(replace(toy_profile(TOY_MODEL, latency), name="toy"), "toy.json", force=True)
        return open_twin(World(trace="", policy=policy, profile="toy.json", **world), append=append, speed=speed)

    return opened
