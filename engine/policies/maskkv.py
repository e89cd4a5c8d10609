"""MaskKV: dLLM-Cache with the prompt's keys that masks vote for."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from ..errors import PolicyError
from ..hooks import held
from ..jit import rule
from ..part import Preset, Range
from .dllm_cache import RUN, PeriodicCache, runs
from .llada import script


@rule
def voted_held(prompt: Any, length: Any, state: Any, p: Any) -> Any:
    """The keys of the prompt that heads keep, each filling its last run in part, and all of the response."""
    kept = runs(prompt) if prompt <= p.budget else p.budget + RUN - 1
    response = length - prompt
    return kept + runs(response) + runs(state * response)


@dataclass(frozen=True)
class MaskKV(PeriodicCache):
    """MaskKV on dLLM-Cache: each head keeps the keys of the prompt that masks vote for, `budget` of them on average.

    Votes are cast once, in the first step. Budgets of layers (beta, boundary) and heads (alpha) differ and add up
    to the same number, so that time depends on `budget` alone, and memory but for the runs begun (3.3, 3.4).
    """

    response_refresh: Annotated[int, Range(1), "steps between refreshes of the response, K_r"] = 5
    budget: Annotated[int, Range(1), "prompt keys of a head, the mean over heads and layers"] = 256
    alpha: Annotated[float, Range(0, 1), "of a layer's budget, the share that its heads divide equally"] = 0.1
    beta: Annotated[float, Range(0, 1), "of the whole budget, the share that layers divide equally"] = 0.4
    boundary: Annotated[tuple[int, ...], "the layers whose importance is weighed apart"] = (0, -1)

    in_place = False  # the prompt is computed elsewhere, and what heads keep of it has places
    votes = True
    rules: ClassVar[dict[Any, Any]] = {held: voted_held}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget < 1:
            raise PolicyError(f"budget is {self.budget}, expected at least 1")
        for name in ("alpha", "beta"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise PolicyError(f"{name} is {getattr(self, name)}, expected 0 to 1")

    @property
    def prompt_keys(self) -> int:  # type: ignore[override]
        """Keys of the prompt that steps between its refreshes see."""
        return self.budget

    def numbers(self, policy: Any) -> dict[str, bool | int | float]:
        return {**super().numbers(policy), "alpha": float(self.alpha), "beta": float(self.beta)}


PRESETS = {
    "maskkv": Preset(
        script("maskkv", MaskKV(logits="block")),
        "budget",
        "full-sequence: MaskKV, dLLM-Cache with the prompt's keys that masks vote for",
        "MaskKV (full-sequence-diffusion.md 3.3)",
    )
}
