"""Refit two factors: how long steps take, and how many steps a token needs, if the evidence identifies them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ..engine.commits import CanvasLaw, CommitModel
from ..profiler.profile import Profile
from ..sim.setting import Setting
from .residuals import PRICES, YIELD, Residuals

FITTED = {"price": "step_time", "steps": "steps_per_token"}  # a factor, and the quantity that identifies it
FITTED_CAUSES = (PRICES, YIELD)
EVIDENCE, MAX_EVIDENCE = 6, 12  # windows of a fit
PRECISE = 0.007  # standard error of a factor's logarithm, above which a fit waits for more windows than EVIDENCE
SURE = 3.0  # standard errors by which a factor must differ from 1


@dataclass(frozen=True)
class Factors:
    """A profile's step time and steps a token, relative to another profile's."""

    price: float = 1.0
    steps: float = 1.0

    @property
    def words(self) -> str:
        changed = [f"{name} x {value:.3f}" for name, value in asdict(self).items() if value != 1.0]
        return ", ".join(changed)


def middle(residuals: Sequence[float]) -> tuple[float, float]:
    """The middle of residuals and its standard error.

    It is the median of the means of all pairs (Hodges and Lehmann 1963), with two thirds of a median's variance.
    """
    noise = 1.4826 * float(np.median(np.abs(np.subtract(residuals, np.median(residuals)))))
    return float(np.median(np.add.outer(residuals, residuals))) / 2, 1.0233 * noise / math.sqrt(len(residuals))


def fit(evidence: Sequence[Residuals]) -> tuple[Factors, dict[str, float]]:
    """The factors that the windows measured, and the standard errors of their logarithms, by quantity.

    A factor stays 1 unless it surely differs.
    """
    factors, errors = {}, {}
    for name, quantity in FITTED.items():
        residuals = [window[quantity][0] for window in evidence if quantity in window]
        if residuals:
            log, errors[quantity] = middle(residuals)
            if abs(log) > SURE * errors[quantity]:
                factors[name] = round(math.exp(log), 6)
    return Factors(**factors), errors


def scaled(setting: Setting, factors: Factors) -> Profile:
    """The setting's profile with its steps' time and its steps a token multiplied."""
    profile = replace(setting.profile, implementations=(), latency=setting.profile.latency.scaled(factors.price))
    if factors.steps == 1.0:
        return profile
    from ..profiler.canvas_law import mean_forwards, with_mean  # imported here: they load SciPy

    law = setting.drawn
    if isinstance(law, CanvasLaw):
        forwards = min(max(law.least, mean_forwards(law) * factors.steps), law.most)
        return replace(profile, canvas_laws=(with_mean(law, forwards),))
    models = dict.fromkeys(filter(None, (law, *setting.by_threshold.values())))
    return replace(profile, commits=tuple(_slower(model, factors.steps) for model in models))


def _slower(model: CommitModel, times: float) -> CommitModel:
    """The commit model with the steps a token multiplied by `times`."""
    from ..profiler.calibrate import bisected, mean_yield, shifted

    target = mean_yield(model) / times
    low, high = bisected(lambda shift: mean_yield(shifted(model, shift)) < target, -4.0, 4.0, 16)
    return shifted(model, (low + high) / 2)
