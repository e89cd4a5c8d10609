"""Refit two factors: how long steps take, and how many steps a token needs, if the evidence identifies them."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..engine.commits import CanvasLaw, CommitModel
from ..profiler.profile import Profile, to_json
from ..results.scenario import Scenario
from ..sim.setting import Setting
from ..traces import Trace
from .alarms import FLOOR
from .predicted import Prediction, Seen, predict
from .residuals import CAUSE_OF, PRICES, RULE, YIELD, Residuals

EVIDENCE, MOST_EVIDENCE, TRIAL = 6, 12, 6  # windows of a candidate's fit, at least and at most; windows of its trial
PRECISE = 0.007  # standard error of a factor's logarithm, above which a fit waits for more windows than EVIDENCE
ROUNDS = 3
FITTED = {"price": "step_time", "steps": "steps_per_token"}  # a factor, and the quantity that identifies it
SURE = 3.0  # standard errors by which a factor must differ from 1; for a candidate's gain it is 2
MOST = 9.0  # the largest squared deviation that counts in a score
LOADS_A_DOUBLING = 2  # buckets of load


@dataclass(frozen=True)
class Factors:
    """A profile's step time and steps a token, relative to another profile's."""

    price: float = 1.0
    steps: float = 1.0

    @property
    def words(self) -> str:
        found = [f"{name} x {value:.3f}" for name, value in asdict(self).items() if value != 1.0]
        return ", ".join(found) or "nothing"


@dataclass(frozen=True)
class Version:
    """A profile that was used, and why."""

    number: int
    time: float  # s since 1970
    begin: float  # of the windows that it was fitted to
    end: float
    windows: int
    grade: str
    reason: str
    factors: Factors  # relative to the version before
    errors: dict[str, float]  # standard errors of the factors' logarithms, by quantity
    gain: float  # mean gain in log score over the version before, per window of the trial
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
    middles = [float(np.median(np.add.outer(of, of))) / 2 for of in buckets.values()]
    weights = np.sqrt([len(of) for of in buckets.values()])
    values = np.array([residual for _, residual in residuals])
    noise = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    # A middle's variance is the noise's over its windows, so each bucket adds the same to the weighted sum's variance.
    error = 1.0233 * noise * math.sqrt(len(buckets)) / float(weights.sum())
    return float(np.average(middles, weights=weights)), error


def precise(known: Sequence[Residuals], causes: Collection[str], deviations: Mapping[str, float]) -> bool:
    """Whether these windows' residuals give the factors of these causes precisely.

    deviations: standard deviations of a window's residual, by quantity, over more windows: these are too few for one.
    """
    for quantity in (name for name in FITTED.values() if CAUSE_OF[name] in causes):
        found = [(1.0, of[quantity][0]) for of in known if quantity in of]
        if found and max(middle(found)[1], deviations[quantity] / math.sqrt(len(found))) > PRECISE:
            return False
    return True


def fit(
    scenario: Scenario, evidence: Sequence[Seen], known: Sequence[Residuals], shape: Trace | None
) -> tuple[Profile, Factors, dict[str, float]]:
    """The profile with which replays of the evidence have no residual. A factor stays 1 unless it surely differs."""
    setting = scenario.setting()
    profile = setting.profile
    logs = dict.fromkeys(FITTED, 0.0)
    errors: dict[str, float] = {}
    seen_range: dict[str, tuple[float, float]] = {}
    moving: list[str] = []
    for round_ in range(ROUNDS):
        for name, quantity in FITTED.items():
            found = [
                (float(seen.window.gauge("running").mean()), of[quantity][0])
                for seen, of in zip(evidence, known, strict=True)
                if quantity in of
            ]
            if not found:
                continue
            value, error = middle(found)
            if not round_:
                errors[quantity] = error
                seen_range[name] = min(r for _, r in found), max(r for _, r in found)
                if abs(value) > SURE * error:
                    moving.append(name)
            if name in moving:
                low, high = seen_range[name]
                logs[name] = min(max(logs[name] + value, low), high)
        profile = scaled(setting, Factors(*(math.exp(logs[name]) for name in FITTED)))
        if not moving or round_ == ROUNDS - 1:
            break
        known = [predict(scenario, replace(setting, profile=profile), seen, shape).residuals for seen in evidence]
    return profile, Factors(*(round(math.exp(logs[name]), 6) for name in FITTED)), errors


def at_measured(
    scenario: Scenario, setting: Setting, seen: Seen, shape: Trace | None, prediction: Prediction,
    measured: Mapping[str, tuple[float, float]],
) -> tuple[Residuals, dict[str, float]]:  # fmt: skip
    """The rule's residuals against a twin at measured prices and yield, and by quantity the standard error from these.

    measured: by quantity, the logarithm of its factor and its standard error. prediction: that of the setting itself.
    """
    logs = {name: measured[quantity][0] for name, quantity in FITTED.items() if quantity in measured}
    profile = scaled(setting, Factors(**{name: math.exp(log) for name, log in logs.items()}))
    other = predict(scenario, replace(setting, profile=profile), seen, shape)
    residuals = {name: of for name, of in other.residuals.items() if CAUSE_OF[name] == RULE}
    # The shift between the two twins, for each unit of the factors' logarithm.
    share = math.hypot(*(error for _, error in measured.values())) / math.hypot(FLOOR, *logs.values())
    return residuals, {
        name: abs(residual - prediction.residuals[name][0]) * share
        for name, (residual, _) in residuals.items() if name in prediction.residuals
    }  # fmt: skip


def candidate(
    scenario: Scenario, evidence: Sequence[Seen], known: Sequence[Residuals], shape: Trace | None
) -> dict[str, Any]:
    """The result of `fit` as JSON, for the background."""
    profile, factors, errors = fit(scenario, evidence, known, shape)
    return {"profile": to_json(profile), "factors": asdict(factors), "errors": errors}


def scaled(setting: Setting, factors: Factors) -> Profile:
    """The setting's profile with its steps' time and its steps a token multiplied."""
    profile = setting.profile
    found = replace(profile, implementations=(), latency=profile.latency.scaled(factors.price))
    if factors.steps == 1.0:
        return found
    from ..profiler.canvas_law import mean_forwards, with_mean  # imported here: they load SciPy

    drawn = setting.drawn
    if isinstance(drawn, CanvasLaw):
        forwards = min(max(drawn.least, mean_forwards(drawn) * factors.steps), drawn.most)
        return replace(found, canvas_laws=(with_mean(drawn, forwards),))
    models = dict.fromkeys([*([] if drawn is None else [drawn]), *setting.by_threshold.values()])
    return replace(found, commits=tuple(_slower(model, factors.steps) for model in models))


def _slower(model: CommitModel, times: float) -> CommitModel:
    """The commit model with the steps a token multiplied by `times`."""
    from ..profiler.calibrate import bisected
    from ..profiler.request_effects import mean_yield, shifted

    wanted = mean_yield(model) / times
    low, high = bisected(lambda by: mean_yield(shifted(model, by)) < wanted, -4.0, 4.0, 16)
    return shifted(model, (low + high) / 2)


def score(prediction: Prediction, deviations: Mapping[str, float]) -> float:
    """The log score of a prediction: minus half the sum of squared deviations, each capped."""
    z = [
        min(MOST, (residual / deviations[name]) ** 2)
        for name, (residual, _) in prediction.residuals.items()
        if CAUSE_OF[name] in (PRICES, YIELD, RULE)
    ]
    return -sum(z) / 2


def better(gains: Sequence[float]) -> bool:
    """Whether a candidate's scores exceed the current profile's by more than luck, over its trial."""
    of = np.array(gains)
    error = float(of.std(ddof=1)) / math.sqrt(len(of)) if len(of) > 1 else math.inf
    return bool(of.mean() > SURE * error and of.mean() > 0)
