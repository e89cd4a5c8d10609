"""Fit a commit model to commit logs by maximum likelihood, and judge it on held-out requests.

A real model need not have this form: the log-odds are then shifted until drawn blocks of the fitted requests take as
many steps as measured.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, logit

from ..engine.chance import key
from ..engine.commits import CommitModel
from ..engine.errors import ProfileError
from .calibrate import shifted
from .commit_log import CommitLog
from .likelihood import Likelihood, Variances
from .profile import CommitFit, Prediction, digits
from .samples import Floats
from .yields import Blocks, blocks, complete, draw, figures, repeated

MAX_ROWS = 2_500  # in the likelihood: the first whole requests
NUM_BLOCKS = 8_000  # drawn to predict a figure
SEED = 20260101
SMALLEST = 0.03  # a smaller spread is stored as 0
SPLIT = 4  # one of four requests is held out, by a hash of its number
SPREADS = ("request_spread", "block_spread", "step_spread")

# Bounds for doubts about a fit.
FEW_REQUESTS = 20
YIELD = 0.05
SHAPE = 0.15
SCATTER = 0.10
PLAIN = ("tokens per step, mean", "steps per block, mean")


def fit_commits(
    log: CommitLog, *, workload: str, threshold: float, temperature: float | None = None, source: str = ""
) -> tuple[CommitModel, CommitFit]:
    """The maximum-likelihood model, and its errors on held-out requests."""
    fitted, judge = split(log)
    if not len(fitted) or not len(judge):
        count = len(np.unique(fitted.request)) + len(np.unique(judge.request))
        raise ProfileError(f"the log holds whole blocks of {count} requests, expected at least {FEW_REQUESTS}")
    likelihood = Likelihood(_few(fitted))
    shape = _Shape(log.block_length, likelihood)
    best = shape.climb()
    errors = shape.standard_errors(best)
    variances = Variances(*best[3:].tolist())
    keys: dict[str, Any] = {
        "workload": workload, "block_length": log.block_length, "threshold": threshold, "temperature": temperature,
    }  # fmt: skip
    model = CommitModel(
        **keys,
        pass_probability=tuple(digits(p) for p in expit(shape.log_odds(best))),
        request_spread=_spread(variances.request),
        block_spread=_spread(variances.block),
        step_spread=_spread(variances.step),
        stage_gain=digits(best[2], 4),
        source=source,
    )
    model = _match(model, fitted)
    predictions = predict(model, judge)
    num_requests, num_held_out = (len(np.unique(half.request)) for half in (fitted, judge))
    doubts = _doubts(num_requests, num_held_out, predictions, _scatter(judge))
    return model, CommitFit(
        **keys,
        num_requests=num_requests,
        num_steps=len(fitted),
        num_held_out=num_held_out,
        standard_errors={name: digits(value, 3) for name, value in errors.items()},
        predictions=predictions,
        doubts=doubts,
    )


def split(log: CommitLog) -> tuple[CommitLog, CommitLog]:
    """Complete blocks of the fitted requests, and of the held-out quarter."""
    log = complete(log)
    held_out = np.asarray(key(SEED, log.request) % np.uint64(SPLIT) == 0, np.bool_)
    return log[~held_out], log[held_out]


def predict(model: CommitModel, judge: CommitLog) -> tuple[Prediction, ...]:
    """Yields of a complete log, measured and as the model draws its blocks."""
    measured = figures(judge)
    predicted = figures(draw(model, _many(blocks(judge)), SEED))
    return tuple(
        Prediction(name, digits(value, 5), digits(predicted[name], 5))
        for name, value in measured.items()
        if name in predicted
    )


class _Shape:
    """The free parameters: the first log-odds, the reach's logarithm, the stage's gain, the variances."""

    bounds = ((-12.0, 12.0), (0.0, 6.0), (-6.0, 6.0), (0.0, 16.0), (0.0, 16.0), (0.0, 16.0))

    def __init__(self, block_length: int, likelihood: Likelihood) -> None:
        self.likelihood, self.block_length = likelihood, block_length

    def log_odds(self, x: Floats) -> Floats:
        """By distance from the frontier."""
        chances = expit(x[0]) * np.exp(-np.arange(self.block_length) / np.exp(x[1]))
        return np.asarray(logit(np.clip(chances, 1e-12, 1 - 1e-9)), np.float64)

    def loss(self, x: Floats) -> float:
        """Minus the log-likelihood."""
        return -self.likelihood.value(self.log_odds(x), float(x[2]), Variances(*x[3:].tolist()))

    def climb(self) -> Floats:
        """The parameters of the greatest likelihood."""
        start = np.array([0.0, 2.0, 0.0, 0.15, 0.1, 0.3])
        options: Any = {"maxiter": 40, "ftol": 1e-6}
        optimum = minimize(self.loss, start, method="L-BFGS-B", bounds=self.bounds, options=options)
        return np.asarray(optimum.x, np.float64)

    def standard_errors(self, x: Floats) -> dict[str, float]:
        """Standard errors of the first log-odds, the gain and the spreads, from the likelihood's curvature."""
        # A variance at its bound of 0 is left out, and known to what costs half a unit of log-likelihood.
        steps = np.diag(np.maximum(0.02, 0.05 * np.abs(x)))
        free = np.flatnonzero((x > 1e-6) | (np.arange(len(x)) < 3))
        middle, once = self.loss(x), {i: (self.loss(x + steps[i]), self.loss(x - steps[i])) for i in free}
        hessian = np.diag([sum(once[i]) - 2 * middle for i in free])
        for row, i in enumerate(free):
            for column, j in enumerate(free[:row]):
                both = self.loss(x + steps[i] + steps[j]) - once[i][0] - once[j][0] + middle
                hessian[row, column] = hessian[column, row] = both
        error = 2.0 * np.sqrt(np.diag(steps))
        inverse = np.diag(np.linalg.pinv(hessian, hermitian=True))
        # A likelihood that is not curved there does not identify the parameter.
        error[free] = np.where(inverse > 0, np.diag(steps)[free] * np.sqrt(np.abs(inverse)), 1.0 + np.abs(x[free]))
        # A spread s has its variance's error / 2s, at most the root of that error.
        spreads = np.minimum(error[3:] / np.maximum(2 * np.sqrt(x[3:]), 1e-9), np.sqrt(error[3:]))
        named = dict(zip(SPREADS, spreads.tolist(), strict=True))
        return {"log_odds[0]": float(error[0]), "stage_gain": float(error[2]), **named}


def _match(model: CommitModel, fitted: CommitLog) -> CommitModel:
    """Shift the log-odds until drawn blocks commit as many tokens a step as the fitted ones."""
    log_blocks = blocks(fitted)
    many = _many(log_blocks)
    num_steps = len(fitted) * len(many.request) / len(log_blocks.request)

    def miss(shift: float) -> float:
        return float(np.log(len(draw(shifted(model, shift), many, SEED)) / num_steps))

    last, last_error = 0.0, miss(0.0)
    shift, error = last_error, miss(last_error)  # too many steps: raise the chance
    for _ in range(2):
        if error == last_error:
            break
        last, shift, last_error = shift, shift - error * (shift - last) / (error - last_error), error
        error = miss(shift)
    best = min((abs(error), shift), (abs(last_error), last))[1]
    matched = shifted(model, best)
    return replace(matched, pass_probability=tuple(map(digits, matched.pass_probability)))


def _spread(variance: float) -> float:
    if variance < SMALLEST**2:
        return 0.0
    return digits(np.sqrt(variance), 3)


def _few(log: CommitLog) -> CommitLog:
    """The first requests, up to MAX_ROWS rows."""
    if len(log) <= MAX_ROWS:
        return log
    return log[log.request < log.request[MAX_ROWS]]


def _many(log_blocks: Blocks) -> Blocks:
    """The blocks, repeated until the scatter of draws is small."""
    return repeated(log_blocks, -(-NUM_BLOCKS // len(log_blocks.request)))


def _scatter(judge: CommitLog) -> float:
    """Relative standard error of the mean tokens per step, from the scatter between requests."""
    request = np.unique(judge.request, return_inverse=True)[1]
    tokens, steps = np.bincount(request, judge.committed.sum(axis=1)), np.bincount(request)
    num = len(steps)
    off = tokens / tokens.mean() - steps / steps.mean()
    return float(np.sqrt((off**2).sum() / max(1, num - 1) / num))


def _doubts(
    num_requests: int, num_held_out: int, predictions: tuple[Prediction, ...], scatter: float
) -> tuple[str, ...]:
    doubts = []
    if num_requests + num_held_out < FEW_REQUESTS:
        doubts.append(f"too few requests: {num_requests + num_held_out}, expected at least {FEW_REQUESTS}")
    for p in predictions:
        bound = YIELD if p.name in PLAIN else SHAPE
        # An error within the held-out requests' scatter is no evidence against the fit.
        if abs(p.error) > max(bound, 2 * scatter):
            doubts.append(
                f"{p.name}: {p.measured:.3g} held out, {p.predicted:.3g} predicted, expected within {bound:.0%}"
            )
    if 2 * scatter > SCATTER:
        doubts.append(
            f"too few requests: the {num_held_out} held out know their tokens per step to ±{2 * scatter:.1%}, "
            f"expected ±{SCATTER:.0%}"
        )
    return tuple(doubts)
