"""Fit a commit model to commit logs by maximum likelihood, and judge it on held-out requests.

A real model need not have this form: the log-odds are then shifted until drawn blocks of the fitted requests take as
many steps as measured.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from ..engine.chance import key
from ..engine.commits import CommitModel
from ..engine.errors import ProfileError
from .commit_log import CommitLog
from .likelihood import Likelihood, Variances
from .profile import CommitFit, Prediction, digits
from .samples import Floats
from .yields import Blocks, blocks, complete, draw, figures, repeated

MAX_ROWS = 8_000  # in the likelihood: the first whole requests
NUM_BLOCKS = 8_000  # drawn to predict a figure
SEED = 20260101
SMALLEST = 0.03  # a smaller spread is stored as 0
SPLIT = 4  # one of four requests is held out, by a hash of its number
SPREADS = ("request_spread", "block_spread", "step_spread")
LOW, HIGH = -12.0, 12.0  # log-odds
ROUGH = 0.05  # penalty on a bend of 1 in the log-odds, in log-likelihood

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
    log_odds, gain, variances = shape.unpack(best)
    keys: dict[str, Any] = {
        "workload": workload, "block_length": log.block_length, "threshold": threshold, "temperature": temperature,
    }  # fmt: skip
    model = CommitModel(
        **keys,
        pass_probability=_table(log_odds),
        request_spread=_spread(variances.request),
        block_spread=_spread(variances.block),
        step_spread=_spread(variances.step),
        stage_gain=digits(gain, 4),
        source=source,
    )
    model = _match(model, log_odds, fitted)
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
    """The free parameters: log-odds at some distances (linear between), the gain, the spreads."""

    def __init__(self, block_length: int, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        marks = [d for d in (0, 1, 2, 3, 5, 8, 12, 17, 23, 31, 47) if d < block_length - 1] + [block_length - 1]
        self.marks = np.array(sorted(set(marks)))
        self.table = np.stack([np.interp(np.arange(block_length), self.marks, row) for row in np.eye(len(self.marks))])
        self.bounds = [(LOW, HIGH)] * len(self.marks) + [(-6.0, 6.0)] + [(0.0, 16.0)] * 3

    def unpack(self, x: Floats) -> tuple[Floats, float, Variances]:
        num = len(self.marks)
        return x[:num] @ self.table, float(x[num]), Variances(*x[num + 1 :].tolist())

    def loss(self, x: Floats) -> tuple[float, Floats]:
        """Minus the log-likelihood, plus a small roughness penalty, and its gradient."""
        value, gradient = self.likelihood.value_and_gradient(*self.unpack(x))
        num, length = self.table.shape
        bend = np.diff(x[:num], 2)
        rough = np.convolve(bend, [1.0, -2.0, 1.0]) if len(bend) else np.zeros(num)
        ascent = np.append(self.table @ gradient[:length] - 2 * ROUGH * rough, gradient[length:])
        return -value + ROUGH * float((bend**2).sum()), -ascent

    def climb(self) -> Floats:
        """The parameters of the greatest likelihood."""
        start: Floats = np.append(np.linspace(0.0, -3.0, len(self.marks)), [0.0, 0.15, 0.1, 0.3])
        options: Any = {"maxiter": 100, "ftol": 1e-8}
        optimum = minimize(self.loss, start, jac=True, method="L-BFGS-B", bounds=self.bounds, options=options)
        return np.asarray(optimum.x, np.float64)

    def standard_errors(self, x: Floats) -> dict[str, float]:
        """Standard errors of the gain, the spreads and the first log-odds, from the likelihood's curvature."""
        num, step = len(self.marks), 1e-3
        gradient = self.loss(x)[1]
        hessian = np.stack([(self.loss(x + step * e)[1] - gradient) / step for e in np.eye(len(x))])
        hessian = (hessian + hessian.T) / 2
        none = (x <= 1e-6) & (np.arange(len(x)) > num)
        error = np.zeros(len(x))
        inner = np.linalg.pinv(hessian[np.ix_(~none, ~none)], hermitian=True)
        error[~none] = np.sqrt(np.maximum(np.diag(inner), 0.0))
        # A variance at its bound of 0: what costs half a unit of log-likelihood.
        error[none] = 0.5 / np.maximum(gradient[none], 1e-3)
        # A spread s has its variance's error / 2s, at most the root of that error.
        spread = {
            name: float(min(error[i] / (2 * max(np.sqrt(x[i]), 1e-9)), np.sqrt(error[i])))
            for i, name in enumerate(SPREADS, num + 1)
        }
        return {"log_odds[0]": float(error[0]), "stage_gain": float(error[num]), **spread}


def _match(model: CommitModel, log_odds: Floats, fitted: CommitLog) -> CommitModel:
    """Shift the log-odds until drawn blocks commit as many tokens a step as the fitted ones."""
    log_blocks = blocks(fitted)
    many = _many(log_blocks)
    num_steps = len(fitted) * len(many.request) / len(log_blocks.request)

    def moved(shift: float) -> CommitModel:
        return replace(model, pass_probability=_table(log_odds + shift))

    def miss(shift: float) -> float:
        return float(np.log(len(draw(moved(shift), many, SEED)) / num_steps))

    last, last_error = 0.0, miss(0.0)
    shift, error = last_error, miss(last_error)  # too many steps: raise the chance
    for _ in range(2):
        if error == last_error:
            break
        last, shift, last_error = shift, shift - error * (shift - last) / (error - last_error), error
        error = miss(shift)
    return moved(shift if abs(error) <= abs(last_error) else last)


def _table(log_odds: Floats) -> tuple[float, ...]:
    return tuple(digits(p) for p in expit(log_odds))


def _spread(variance: float) -> float:
    return digits(np.sqrt(variance), 3) if variance >= SMALLEST**2 else 0.0


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
