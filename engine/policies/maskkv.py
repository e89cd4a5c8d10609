"""MaskKV: dLLM-Cache with the prompt keys that masks vote for."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..hooks import held
from ..jit import rule
from ..part import Preset, Range
from .dllm_cache import RUN, PeriodicCache, runs
from .llada import script

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@rule
def voted_held(prompt: int, length: int, state: int, fields: Any) -> int:
    """Kept prompt keys of heads, last runs partly filled, and the whole response."""
    prompt_keys = fields.budget + RUN - 1
    if prompt <= fields.budget:
        prompt_keys = runs(prompt)
    response = length - prompt
    return prompt_keys + runs(response) + runs(state * response)


@dataclass(frozen=True)
class MaskKV(PeriodicCache):
    """MaskKV on dLLM-Cache: each head keeps prompt keys that masks vote for, `budget` on average (3.3, 3.4).

    Votes are cast in the first step. Layers' budgets (beta, boundary) and heads' (alpha) have a fixed sum: time depends
    only on `budget`, as does memory but for partly filled runs.
    """

    response_refresh: Annotated[int, Range(1), "steps between refreshes of the response, K_r"] = 5
    budget: Annotated[int, Range(1), "prompt keys per head, averaged over heads and layers"] = 256

    alpha: ClassVar[float] = 0.1  # share of a layer's budget that its heads divide equally
    beta: ClassVar[float] = 0.4  # share of the whole budget that layers divide equally
    boundary: ClassVar[tuple[int, ...]] = (0, -1)  # layers that share their importance as a group of their own
    first_layer_whole = False  # no prompt is carried along
    in_place = False  # prompts are computed elsewhere; kept keys have own places
    votes = True
    rules: ClassVar[dict[Any, Any]] = {held: voted_held}

    @property
    def prompt_keys(self) -> int:  # type: ignore[override]
        return self.budget


# Prompt keys kept by each layer and head (3.3, 3.4). Ours: a head keeps at most the prompt, its excess goes to others
# in proportion, rounding adds one each; the mean is the budget, or a shorter prompt.


def layer_budgets(rule: MaskKV, importance: Floats, prompt: int) -> Ints:
    """Mean prompt keys kept by a head of each layer, [layers].

    importance [layers]: change of a layer's input by attention, 1 - cos (eq. 8). Boundary layers share their total
    importance equally, and so do the others.
    """
    n = len(importance)
    if prompt <= rule.budget:
        return np.full(n, prompt, np.int64)
    group = np.zeros(n, np.int64)
    group[list(rule.boundary)] = 1
    members, weights = np.bincount(group, minlength=2), np.bincount(group, weights=importance, minlength=2)
    shares = np.full(n, 1 / n)
    if members.all() and weights.sum() > 0:
        shares = (weights / weights.sum() / members)[group]
    return divided(n * rule.budget, rule.beta / n + (1 - rule.beta) * shares, prompt)


def head_budgets(rule: MaskKV, preference: Floats, mean: int, prompt: int) -> Ints:
    """Prompt keys kept by each head of a layer, [heads], with this `mean`.

    preference [heads]: the prompt's share of masks' attention to prompt and masks (eq. 14).
    """
    n = len(preference)
    shares = np.full(n, 1 / n)
    if preference.sum() > 0:
        shares = preference / preference.sum()
    return divided(n * mean, rule.alpha / n + (1 - rule.alpha) * shares, prompt)


def divided(total: int, shares: Floats, limit: int) -> Ints:
    """`total` divided by shares into whole numbers up to `limit`."""
    amounts = np.full(len(shares), float(limit))
    open_ = np.ones(len(shares), np.bool_)  # below the limit
    while open_.any():
        remaining, weights = total - limit * int((~open_).sum()), shares[open_]
        if weights.sum() == 0:
            weights = np.ones(len(weights))
        amounts[open_] = remaining * (weights / weights.sum())
        capped = open_ & (amounts >= limit)
        if not capped.any():
            break
        amounts[capped] = limit
        open_ &= ~capped
    parts = amounts.astype(np.int64)
    order = np.argsort(np.where(open_, -shares, np.inf), kind="stable")
    parts[order[: total - int(parts.sum())]] += 1
    return parts


PRESETS = {
    "maskkv": Preset(
        script("maskkv", MaskKV(logits="block"), "dllm-cache"),  # on which it is built
        "budget",
        "full-sequence: MaskKV, dLLM-Cache with the prompt's keys that masks vote for",
        "MaskKV (full-sequence-diffusion.md 3.3)",
        probe="maskkv:16,prompt_refresh=7,response_refresh=3",
    )
}
