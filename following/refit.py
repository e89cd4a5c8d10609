"""Refit two factors: how long steps take, and how many steps a token needs, if the evidence identifies them."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..engine.commits import CanvasLaw, CommitModel
from ..profiler.profile import Profile
from ..results.world import World
from ..sim.setting import Setting
from .alarms import FLOOR
from .predicted import Observed, Prediction, predict
from .residuals import CAUSE_OF, PRICES, RULE, YIELD, Residuals

FITTED = {"price": "step_time", "steps": "steps_per_token"}  # a factor, and the quantity that identifies it
FITTED_CAUSES = (PRICES, YIELD)
EVIDENCE, MOST_EVIDENCE = 6, 12  # windows of a fit, at least and at most
PRECISE = 0.007  # standard error of a factor's logarithm, above which a fit waits for more windows than EVIDENCE
SURE = 3.0  # standard errors by which a factor must differ from 1
LOADS_A_DOUBLING = 2  # buckets of load

Evidence = Sequence[tuple[float, Residuals]]  # by window: mean running requests, and residuals


@dataclass(frozen=True)
class Factors:
    """A profile's step time and steps a token, relative to another profile's."""

    price: float = 1.0
    steps: float = 1.0

    @property
    def words(self) -> str:
        changed = [f"{name} x {value:.3f}" for name, value in asdict(self).items() if value != 1.0]
        return ", ".join(changed) or "nothing"


@dataclass(frozen=True)
class Version:
    """A profile that was used, and why."""

    number: int
    time: float  # s since 1970
    begin: float  # of the windows that it was fitted to
    windows: int
    reason: str
    factors: Factors  # relative to the version before
    errors: dict[str, float]  # standard errors of the factors' logarithms, by quantity
    profile: str  # its file

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Version":
        """The version of a line."""
        return cls(**{**data, "factors": Factors(**data["factors"])})


def middle(residuals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The weighted mean of the middles of load buckets, and its standard error. residuals: pairs of load and residual.

    A bucket's weight is the root of its number of windows: a load that lasts long does not outweigh the others, and a
    single window's noise counts less than that of many. The middle is the median of the means of all pairs (Hodges and
    Lehmann 1963), with two thirds of a median's variance.
    """
    buckets: dict[int, list[float]] = {}
    for load, residual in residuals:
        buckets.setdefault(round(LOADS_A_DOUBLING * math.log2(max(load, 0.1))), []).append(residual)
    middles = [float(np.median(np.add.outer(bucket, bucket))) / 2 for bucket in buckets.values()]
    weights = np.sqrt([len(bucket) for bucket in buckets.values()])
    values = np.array([residual for _, residual in residuals])
    noise = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    # A middle's variance is the noise's over its windows, so each bucket adds the same to the weighted sum's variance.
    error = 1.0233 * noise * math.sqrt(len(buckets)) / float(weights.sum())
    return float(np.average(middles, weights=weights)), error


def residuals_by_load(evidence: Evidence, quantity: str) -> list[tuple[float, float]]:
    """The load and the residual of each window that measured a quantity."""
    return [(load, residuals[quantity][0]) for load, residuals in evidence if quantity in residuals]


def precise(evidence: Evidence, causes: Collection[str], deviations: Mapping[str, float]) -> bool:
    """Whether these windows give the factors of these causes precisely.

    deviations: standard deviations of a window's residual, by quantity, over more windows: these are too few for one.
    """
    for quantity in FITTED.values():
        residuals = residuals_by_load(evidence, quantity)
        if CAUSE_OF[quantity] not in causes or not residuals:
            continue
        if max(middle(residuals)[1], deviations[quantity] / math.sqrt(len(residuals))) > PRECISE:
            return False
    return True


def fit(evidence: Evidence) -> tuple[Factors, dict[str, float]]:
    """The factors that the windows measured, and the standard errors of their logarithms, by quantity.

    A factor stays 1 unless it surely differs.
    """
    factors, errors = {}, {}
    for name, quantity in FITTED.items():
        residuals = residuals_by_load(evidence, quantity)
        if residuals:
            value, errors[quantity] = middle(residuals)
            if abs(value) > SURE * errors[quantity]:
                factors[name] = round(math.exp(value), 6)
    return Factors(**factors), errors


def at_measured(
    world: World, setting: Setting, observed: Observed, prediction: Prediction,
    measured: Mapping[str, tuple[float, float]],
) -> tuple[Residuals, dict[str, float]]:  # fmt: skip
    """The rule's residuals against a twin at measured prices and yield, and by quantity the standard error from these.

    measured: by quantity, the logarithm of its factor and its standard error. prediction: that of the setting itself.
    """
    logs = {name: measured[quantity][0] for name, quantity in FITTED.items() if quantity in measured}
    profile = scaled(setting, Factors(**{name: math.exp(log) for name, log in logs.items()}))
    moved = predict(world, replace(setting, profile=profile), observed)
    residuals = {name: pair for name, pair in moved.residuals.items() if CAUSE_OF[name] == RULE}
    # The shift between the two twins, for each unit of the factors' logarithm.
    share = math.hypot(*(error for _, error in measured.values())) / math.hypot(FLOOR, *logs.values())
    return residuals, {
        name: abs(residual - prediction.residuals[name][0]) * share
        for name, (residual, _) in residuals.items() if name in prediction.residuals
    }  # fmt: skip


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
    models = dict.fromkeys([*([] if law is None else [law]), *setting.by_threshold.values()])
    return replace(profile, commits=tuple(_slower(model, factors.steps) for model in models))


def _slower(model: CommitModel, times: float) -> CommitModel:
    """The commit model with the steps a token multiplied by `times`."""
    from ..profiler.calibrate import bisected, mean_yield, shifted

    target = mean_yield(model) / times
    low, high = bisected(lambda shift: mean_yield(shifted(model, shift)) < target, -4.0, 4.0, 16)
    return shifted(model, (low + high) / 2)
