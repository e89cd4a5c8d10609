"""How requests differ: quantiles of what each adds to the log-odds, nonparametric, from a log.

Maximum likelihood on a grid (Laird 1978): a few rounds of expectation maximisation from the fitted normal bend it
without spikes.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np
from scipy.special import expit, logit, ndtr

from ..engine.commits import CommitModel
from ..engine.errors import ProfileError
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
    seen = fitted.of_requests(log_odds, gain, variances)
    prior = normal(fitted.grid, model.request_spread)
    found = climbed(seen, prior)
    other = judge.of_requests(log_odds, gain, variances)
    if float(np.log(other @ found).sum() - np.log(other @ prior).sum()) < BETTER:
        return (), {}
    rng = np.random.Generator(np.random.PCG64(SEED))
    again = [climbed(seen[rng.integers(len(seen), size=len(seen))], prior) for _ in range(RESAMPLES)]
    errors = {name: float(np.std([_quantiles(fitted.grid, w, np.array([q]))[0] for w in again])) for q, name in TAILS}
    return tuple(digits(v, 4) for v in _quantiles(fitted.grid, found, EVENLY)), errors


def climbed(seen: Floats, start: Floats) -> Floats:
    """The grid's weights after ROUNDS; seen [requests, grid]: likelihoods."""
    weight = start
    for _ in range(ROUNDS):
        of_request = seen * weight
        weight = (of_request / np.maximum(of_request.sum(axis=1, keepdims=True), 1e-300)).mean(axis=0)
    return weight


def normal(grid: Floats, spread: float) -> Floats:
    """The normal distribution on the grid."""
    edges = np.append(grid - STEP / 2, grid[-1] + STEP / 2)
    weight = np.diff(ndtr(edges / spread))
    return np.asarray(np.maximum(weight / weight.sum(), 1e-12), np.float64)


def with_tail(model: CommitModel, p90_over_p50: float) -> CommitModel:
    """Set the spread between requests that gives a published tail, at the same mean yield.

    p90_over_p50: of steps per token, between requests of eight blocks. ProfileError if no spread gives it.
    """

    def tail(spread: float) -> float:
        return _tail(same_mean(model, replace(model, request_spread=spread, request_quantiles=())))

    low, high = 0.0, 4.0
    if not tail(low) <= p90_over_p50 <= tail(high):
        raise ProfileError(
            f"p90 over p50 is {p90_over_p50:g}, expected {tail(low):.3g} (requests that are alike) to {tail(high):.3g}"
        )
    low, high = bisected(lambda spread: tail(spread) < p90_over_p50, low, high, 9)
    return same_mean(model, replace(model, request_spread=digits((low + high) / 2, 3), request_quantiles=()))


def mixture(model: CommitModel, means: list[float], shares: list[float]) -> CommitModel:
    """A mixture of classes, each with a mean and a share, and `model`'s spread inside."""
    total = sum(shares)
    offsets = [_offset(model, mean) for mean in means]
    low, high = min(offsets) - 8.0, max(offsets) + 8.0
    x = np.linspace(low, high, 8001)
    spread = max(model.request_spread, 1e-3)
    below = sum(s / total * ndtr((x - o) / spread) for o, s in zip(offsets, shares, strict=True))
    effects = np.interp(EVENLY, np.asarray(below), x)
    return replace(model, request_quantiles=tuple(digits(v, 4) for v in effects))


def scaled(model: CommitModel, spread: float) -> CommitModel:
    """Another spread between requests; quantiles keep their shape."""
    if model.request_quantiles and model.request_spread > 0:
        ratio = spread / model.request_spread
        middle = float(np.mean(model.request_quantiles))
        effects = tuple(middle + ratio * (v - middle) for v in model.request_quantiles)
        return replace(model, request_spread=spread, request_quantiles=effects)
    return replace(model, request_spread=spread)


def shifted(model: CommitModel, by: float) -> CommitModel:
    """`by` added to all log-odds."""
    if by == 0.0:
        return model
    p = np.clip(np.asarray(model.pass_probability), 1e-12, 1 - 1e-9)
    return replace(model, pass_probability=tuple(float(v) for v in expit(logit(p) + by)))


@lru_cache(maxsize=1024)
def mean_yield(model: CommitModel) -> float:
    """Mean tokens of an ordinary denoise step, to about 1 %; same dice for all models."""
    blocks = FEW_BLOCKS * 32 // max(32, model.block_length)
    return simulate(
        model.pass_probability, model.request_spread, model.block_spread, model.step_spread, blocks,
        effects=model.request_effects() if model.request_quantiles else None,
    )[0]  # fmt: skip


def same_mean(model: CommitModel, other: CommitModel) -> CommitModel:
    """`other` at the model's mean yield."""
    return shifted(other, _offset(other, mean_yield(model)))


def _offset(model: CommitModel, mean: float) -> float:
    """The shift of the log-odds that gives this mean yield, to about 1 %."""
    return sum(bisected(lambda by: mean_yield(shifted(model, by)) < mean, -6.0, 6.0, 10)) / 2


@lru_cache(maxsize=256)
def _tail(model: CommitModel) -> float:
    """p90 / p50 of steps per token, between requests of eight blocks."""
    from .yields import Blocks, block_of, draw

    num, blocks, length = 400, 8, model.block_length
    request = np.repeat(np.arange(num), blocks)
    start = np.tile(np.arange(blocks) * length, num)
    found = Blocks(
        length, request, start, np.ones((len(request), length), np.bool_), np.full((len(request), 1), length)
    )  # fmt: skip
    log = draw(model, found, SEED)
    steps = np.bincount(block_of(log)).reshape(num, blocks).sum(axis=1)
    p50, p90 = np.quantile(steps, [0.5, 0.9])
    return float(p90 / p50)


def _quantiles(grid: Floats, weight: Floats, at: Floats) -> Floats:
    """Quantiles of weights on the grid, each spread evenly over its cell."""
    edges = np.append(grid - STEP / 2, grid[-1] + STEP / 2)
    below = np.concatenate([[0.0], np.cumsum(weight)]) / weight.sum()
    return np.asarray(np.interp(at, below, edges), np.float64)
