"""How requests differ: quantiles of what each adds to the log-odds, nonparametric, from a log.

Maximum likelihood on a grid (Laird 1978): a few rounds of expectation maximisation from the fitted normal bend it
without spikes.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np
from scipy.special import expit, logit, ndtr

from ..engine.commits import CommitModel
from .calibrate import bisected, simulate
from .likelihood import STEP, Likelihood, Variances
from .profile import digits
from .samples import Floats

ROUNDS = 40
NUM_QUANTILES = 64
EVENLY = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES  # where quantiles are taken
RESAMPLES = 100
SEED = 20260102
BETTER = 2.0  # gain in held-out log-likelihood needed to replace the normal
FEW_BLOCKS = 2000  # of at most 32 tokens; fewer of longer ones
TAILS = ((0.1, "request_p10"), (0.9, "request_p90"))


def fit_effects(
    model: CommitModel, log_odds: Floats, gain: float, variances: Variances, fitted: Likelihood, judge: Likelihood
) -> tuple[tuple[float, ...], dict[str, float]]:
    """Quantiles of the requests' effects, and standard errors of their 10th and 90th percentile.

    Empty if requests hardly differ, or held-out ones (`judge`) are as likely under the normal distribution.
    """
    if model.request_spread == 0.0:
        return (), {}
    likelihoods = fitted.of_requests(log_odds, gain, variances)
    prior = normal(fitted.grid, model.request_spread)
    weights = climbed(likelihoods, prior)
    other = judge.of_requests(log_odds, gain, variances)
    if float(np.log(other @ weights).sum() - np.log(other @ prior).sum()) < BETTER:
        return (), {}
    rng = np.random.Generator(np.random.PCG64(SEED))
    again = [
        climbed(likelihoods[rng.integers(len(likelihoods), size=len(likelihoods))], prior) for _ in range(RESAMPLES)
    ]
    errors = {name: float(np.std([_quantiles(fitted.grid, w, np.array([q]))[0] for w in again])) for q, name in TAILS}
    return tuple(digits(v, 4) for v in _quantiles(fitted.grid, weights, EVENLY)), errors


def climbed(likelihoods: Floats, start: Floats) -> Floats:
    """The grid's weights after ROUNDS; seen [requests, grid]: likelihoods."""
    weight = start
    for _ in range(ROUNDS):
        of_request = likelihoods * weight
        weight = (of_request / np.maximum(of_request.sum(axis=1, keepdims=True), 1e-300)).mean(axis=0)
    return weight


def normal(grid: Floats, spread: float) -> Floats:
    """The normal distribution on the grid."""
    edges = np.append(grid - STEP / 2, grid[-1] + STEP / 2)
    weight = np.diff(ndtr(edges / spread))
    return np.asarray(np.maximum(weight / weight.sum(), 1e-12), np.float64)


def scaled(model: CommitModel, spread: float) -> CommitModel:
    """Another spread between requests; quantiles keep their shape."""
    if model.request_quantiles and model.request_spread > 0:
        ratio = spread / model.request_spread
        middle = float(np.mean(model.request_quantiles))
        effects = tuple(middle + ratio * (v - middle) for v in model.request_quantiles)
        return replace(model, request_spread=spread, request_quantiles=effects)
    return replace(model, request_spread=spread)


def shifted(model: CommitModel, shift: float) -> CommitModel:
    """`shift` added to all log-odds."""
    if shift == 0.0:
        return model
    p = np.clip(np.asarray(model.pass_probability), 1e-12, 1 - 1e-9)
    return replace(model, pass_probability=tuple(float(v) for v in expit(logit(p) + shift)))


@lru_cache(maxsize=1024)
def mean_yield(model: CommitModel) -> float:
    """Mean tokens of an ordinary denoise step, to about 1 %; same dice for all models."""
    blocks = FEW_BLOCKS * 32 // max(32, model.block_length)
    return simulate(
        model.pass_probability, model.request_spread, model.block_spread, model.step_spread, blocks,
        effects=model.request_effects() if model.request_quantiles else None,
    )[0]  # fmt: skip


def same_mean(model: CommitModel, other: CommitModel) -> CommitModel:
    """`other` at the model's mean yield, to about 1 %."""
    mean = mean_yield(model)
    return shifted(other, sum(bisected(lambda shift: mean_yield(shifted(other, shift)) < mean, -6.0, 6.0, 10)) / 2)


def _quantiles(grid: Floats, weight: Floats, shares: Floats) -> Floats:
    """Quantiles of weights on the grid, each spread evenly over its cell."""
    edges = np.append(grid - STEP / 2, grid[-1] + STEP / 2)
    below = np.concatenate([[0.0], np.cumsum(weight)]) / weight.sum()
    return np.asarray(np.interp(shares, below, edges), np.float64)
