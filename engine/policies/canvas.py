"""A canvas: tokens after the committed text, decoded together, all computed every step (DiffusionGemma).

Positions may change until the canvas commits: time depends only on the number of steps, by the profile's law
(production-dllm-serving.md 1.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from ..errors import PolicyError
from ..hooks import leap
from ..part import Answers, Granularity, Policy, Range
from ..rows.canvases import CANVAS
from ..rows.leap import leap_canvases
from ..unmasking import Unmasking

MAX_CANVAS = 1024
BY_LAW = Unmasking(strategy="law")


@dataclass(frozen=True)
class Canvas(Granularity):
    """A canvas computed whole every step, then a causal pass that stores its KV."""

    canvas_length: Annotated[int, Range(1, MAX_CANVAS), "tokens of a canvas"] = 256

    rows = CANVAS
    family = "canvas"
    whole_block = True
    under_budget = True
    on_a_grid = False

    @property
    def block_length(self) -> int:  # type: ignore[override]
        return self.canvas_length

    def check(self, policy: Policy) -> None:
        if policy.unmasking.strategy != "law":
            raise PolicyError(f"{policy.name}: strategy is {policy.unmasking.strategy}, expected law for a canvas")
        if policy.eviction.evicts:
            raise PolicyError(f"{policy.name}: a canvas is computed whole, expected no eviction")

    def numbers(self, policy: Policy) -> Mapping[str, bool | int | float]:
        # A step decided ahead needs room for the next canvas.
        scratch = self.canvas_length * policy.batching.hides_host
        none = dict.fromkeys(("drafts", "look_ahead", "hash_ahead", "slots", "queries"), 0)
        return {**none, "canvases": True, "scratch": scratch}

    def answers(self, policy: Policy) -> Answers:
        return {leap: leap_canvases}
