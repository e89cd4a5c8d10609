"""Commit models from a published mean: bisect the pass probability that gives simulated blocks this mean.

The mean is per denoise step, B / E[steps per block]. Published tables give neither the fall of the chance with distance
nor the spread between blocks and steps: the constants here are assumed (research/evidence/profile-calibration.md).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ..engine.commits import CommitModel
from .profile import digits
from .samples import Floats

REACH = 8.0  # positions
# Standard deviations of the log-odds.
REQUEST_SPREAD = 1.96
SPREAD_SOURCE = (
    "how requests differ: the log-odds spread by 1.96, at which 2.8 tokens a step go with a P90 over P50 of 3.0 of "
    "requests' steps a token, which puts P90 at 50 ms a token at Optimus's published capacities (arXiv 2605.24832, "
    "section 7, SDAR-8B, ShareGPT: 2.60, 5.54 and 5.06 req/s of whole blocks, chunks of 8 and elastic ones)"
)
ALIKE = 0.35  # of requests of one kind; assumed to scatter as published steps do
BLOCK_SPREAD = 0.25
MAX_STEP_SPREAD = 4.0
STD_PER_MEAN = 2.0 / 2.2  # ordinary steps: std about 2 at a mean of 2.2 (Optimus, Table 2)
NUM_BLOCKS = 12_000
FEW_BLOCKS = 2000  # of at most 32 tokens; fewer of longer ones
SEED = 20260101


def calibrate_commits(
    target_mean: float,
    block_length: int = 32,
    *,
    workload: str,
    threshold: float,
    temperature: float | None = None,
    source: str = "",
    solved: tuple[float, float] | None = None,
) -> CommitModel:
    """A commit model whose ordinary steps commit `target_mean` tokens, scattered as published.

    solved: a stored result of `solve`.
    """
    p0, step_spread = solved or solve(target_mean, block_length)
    return CommitModel(
        workload=workload,
        block_length=block_length,
        threshold=threshold,
        temperature=temperature,
        pass_probability=pass_table(p0, reach(target_mean), block_length),
        request_spread=REQUEST_SPREAD,
        block_spread=BLOCK_SPREAD,
        step_spread=step_spread,
        source=source,
    )


def solve(target_mean: float, block_length: int = 32) -> tuple[float, float]:
    """The chance at the frontier and the spread of steps, by bisection: mean within 0.2 %, std of requests of one kind.

    Blocks longer than 32 tokens are simulated in smaller number: mean within 1 %.
    """
    num_blocks = round(NUM_BLOCKS * min(1.0, 32 / block_length) ** 1.5)
    few = num_blocks // 8

    def too_even(spread: float) -> bool:
        p0 = _first_chance(target_mean, (ALIKE, spread), block_length, few, 8)
        table = pass_table(p0, reach(target_mean), block_length)
        return simulate(table, ALIKE, BLOCK_SPREAD, spread, few)[1] < STD_PER_MEAN * target_mean

    spread = round(sum(bisected(too_even, 0.0, MAX_STEP_SPREAD, 6)) / 2, 2)
    return _first_chance(target_mean, (REQUEST_SPREAD, spread), block_length, num_blocks, 13), spread


def bisected(below: Callable[[float], bool], low: float, high: float, rounds: int) -> tuple[float, float]:
    """The interval where `below` becomes false, after `rounds` bisections."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low, high


def per_denoise_step(per_forward: float, block_length: int) -> float:
    """Tokens per denoise step, from a figure that also counts the KV-writing forward."""
    return block_length / (block_length / per_forward - 1.0)


def reach(target_mean: float) -> float:
    """Distance over which the chance falls by e: 8 positions, more if steps commit many tokens."""
    return max(REACH, target_mean**2)


def pass_table(p0: float, reach: float, block_length: int) -> tuple[float, ...]:
    """p0 * exp(-d / reach) by distance d, to six significant digits."""
    return tuple(digits(p) for p in p0 * np.exp(-np.arange(block_length) / reach))


def simulate(
    pass_probability: tuple[float, ...],
    request_spread: float,
    block_spread: float,
    step_spread: float,
    num_blocks: int = NUM_BLOCKS,
    seed: int = SEED,
) -> tuple[float, float]:
    """Mean and std of tokens per denoise step, over whole blocks of different requests."""
    from scipy.special import ndtri

    rng = np.random.Generator(np.random.PCG64(seed))
    p = np.minimum(np.asarray(pass_probability), 1.0 - 1e-12)
    log_odds = np.log(np.maximum(p, 1e-300)) - np.log1p(-p)
    length = len(p)
    block = _normals(rng, num_blocks) * np.hypot(request_spread, block_spread)
    masked = np.ones((num_blocks, length), bool)
    alive = np.arange(num_blocks)
    steps = squares = 0.0
    while len(block):
        # Finished blocks draw too: each keeps its dice while a bisection changes the chances.
        theta = block + step_spread * ndtri(rng.random(num_blocks)[alive])
        frontier = masked.argmax(axis=1)
        distance = np.maximum(np.arange(length) - frontier[:, None], 0)
        u = rng.random((num_blocks, length))[alive]
        score = np.where(masked, log_odds[distance] + theta[:, None] - np.log(u / (1.0 - u)), -np.inf)
        commit = score > 0.0
        commit[np.arange(len(block)), score.argmax(axis=1)] = True
        counts = commit.sum(axis=1)
        steps += len(block)
        squares += float((counts.astype(np.float64) ** 2).sum())
        masked &= ~commit
        unfinished = masked.any(axis=1)
        masked, block, alive = masked[unfinished], block[unfinished], alive[unfinished]
    mean = num_blocks * length / steps
    return mean, float(np.sqrt(squares / steps - mean**2))


def shifted(model: CommitModel, shift: float) -> CommitModel:
    """`shift` added to all log-odds."""
    from scipy.special import expit, logit  # a replay reads this file without SciPy

    if shift == 0.0:
        return model
    p = np.clip(np.asarray(model.pass_probability), 1e-12, 1 - 1e-9)
    return replace(model, pass_probability=tuple(float(v) for v in expit(logit(p) + shift)))


@lru_cache(maxsize=1024)
def mean_yield(model: CommitModel) -> float:
    """Mean tokens of an ordinary denoise step, to about 1 %; same dice for all models."""
    blocks = FEW_BLOCKS * 32 // max(32, model.block_length)
    spreads = model.request_spread, model.block_spread, model.step_spread
    return simulate(model.pass_probability, *spreads, num_blocks=blocks)[0]


def same_mean(model: CommitModel, other: CommitModel) -> CommitModel:
    """`other` at the model's mean yield, to about 1 %."""
    mean = mean_yield(model)
    return shifted(other, sum(bisected(lambda shift: mean_yield(shifted(other, shift)) < mean, -6.0, 6.0, 10)) / 2)


def _first_chance(
    target_mean: float, spreads: tuple[float, float], block_length: int, num_blocks: int, rounds: int
) -> float:
    """The chance at the frontier that gives `target_mean`; spreads: of requests, steps."""

    def too_few(odds: float) -> bool:
        table = pass_table(1.0 / (1.0 + np.exp(-odds)), reach(target_mean), block_length)
        return simulate(table, spreads[0], BLOCK_SPREAD, spreads[1], num_blocks)[0] < target_mean

    return digits(1.0 / (1.0 + np.exp(-sum(bisected(too_few, -8.0, 8.0, rounds)) / 2)), 5)


def _normals(rng: np.random.Generator, num: int) -> Floats:
    """Standard normals at even quantiles, shuffled: their mean is exact."""
    from scipy.special import ndtri  # a replay reads this file without SciPy

    return np.asarray(rng.permutation(ndtri((np.arange(num) + 0.5) / num)), np.float64)
