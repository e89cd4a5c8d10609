"""The log-likelihood of a commit log under a commit model, and its gradient.

A mask at distance d passes with log-odds l[d] + t; t sums the normal parts of request, block and step and the stage's
gain (engine/commits.py). Given t, a step that computes masks D and commits C has the likelihood

    prod_C p(d, t) prod_D-C (1 - p(d, t)) = exp(sum_C (l[d] + t)) N(t),    N(t) = prod_D (1 - p(d, t))

A single commit i may have been forced: no mask passed, and i was the likeliest. That adds

    integral from t to infinity of p(i, x) N(x) dx .

t lies on a grid; the parts are integrated out in the order step, block, request. Normals on the grid are discrete
Gaussians exp(-v) I_n(v) (Lindeberg 1990), of exact variance however narrow.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import toeplitz
from scipy.special import expit, ive

from .commit_log import CommitLog
from .samples import Floats, Ints
from .yields import block_of

STEP = 0.25  # of the grid
REACH = 10.0  # log-odds that request, block and step may add
BEYOND = 16.0  # upper limit of a forced commit's integral


@dataclass(frozen=True)
class Variances:
    request: float
    block: float
    step: float


class Likelihood:
    """A sorted log's rows, prepared for evaluation under many models."""

    def __init__(self, log: CommitLog) -> None:
        length = log.block_length
        column = np.arange(length)
        frontier = np.argmax(log.masked, axis=1)
        shifted = np.minimum(column + frontier[:, None], length - 1)
        inside = column + frontier[:, None] < length
        self.computed = (np.take_along_axis(log.window, shifted, axis=1) & inside).astype(np.float64)
        self.committed = (np.take_along_axis(log.committed, shifted, axis=1) & inside).astype(np.float64)
        done = length - log.masked.sum(axis=1)
        self.stages = [(value / length, np.flatnonzero(done == value)) for value in np.unique(done)]
        self.num = self.committed.sum(axis=1)
        self.lone = np.where(self.num == 1, np.argmax(self.committed, axis=1), -1)
        block = block_of(log)
        self.block = block
        self.first_row = np.flatnonzero(np.diff(block, prepend=-1))
        of_block = np.unique(log.request[self.first_row], return_inverse=True)[1]
        self.request: Ints = np.asarray(of_block, np.int64)
        self.first_block = np.flatnonzero(np.diff(self.request, prepend=-1))
        self.grid = np.asarray(np.arange(-round(REACH / STEP), round(REACH / STEP) + 1) * STEP, np.float64)
        self.wide_grid = np.arange(-round(REACH / STEP), round(BEYOND / STEP) + 1) * STEP

    def value_and_gradient(self, log_odds: Floats, gain: float, variances: Variances) -> tuple[float, Floats]:
        """The log-likelihood, and its derivatives by log_odds, gain and variances in order."""
        size = len(self.grid)
        table, parts = self._of_rows(log_odds, gain)
        value, weight, by_variance = self._integrate(table, variances)

        by_odds, by_gain = np.zeros(len(log_odds)), 0.0
        for stage, who, single, passes, under, forced, passed_share in parts:
            # Passed: each commit counts once, each computed mask its chance of passing.
            share = weight[who] * passed_share
            derivative = share.sum(axis=1) @ self.committed[who]
            derivative -= ((self.computed[who].T @ share) * passes[:, :size]).sum(axis=1)
            # Forced: the same under the integral, where x counts for every t below it.
            per = (weight[who[single]] - share[single]) / forced
            below = np.repeat(per.sum(axis=1, keepdims=True), under.shape[1], axis=1)
            below[:, :size] = np.cumsum(per, axis=1) - 0.5 * per
            inside = STEP * below * under
            i = self.lone[who[single]]
            derivative += np.bincount(i, (inside * (1.0 - passes[i])).sum(axis=1), minlength=len(log_odds))
            derivative -= ((self.computed[who[single]].T @ inside) * passes).sum(axis=1)
            by_odds += derivative
            by_gain += stage * derivative.sum()
        return value, np.concatenate([by_odds, [by_gain], by_variance])

    def _of_rows(self, log_odds: Floats, gain: float) -> tuple[Floats, list[Any]]:
        """Each row's log-likelihood at each t [rows, grid], and its gradient's terms."""
        size = len(self.grid)
        table = np.empty((len(self.num), size))
        parts = []
        for stage, who in self.stages:
            t = self.wide_grid + gain * stage
            # log N, and the log-odds of the whole commit
            none = -self.computed[who] @ np.logaddexp(0.0, log_odds[:, None] + t)
            passed = none[:, :size] + (self.committed[who] @ log_odds)[:, None] + self.num[who, None] * t[:size]
            passes = expit(log_odds[:, None] + t)
            single = np.flatnonzero(self.num[who] == 1)
            # The integrand, then its integral by the trapezium rule.
            under = passes[self.lone[who[single]]] * np.exp(none[single])
            forced = np.cumsum(under[:, ::-1], axis=1)[:, ::-1][:, :size] - 0.5 * under[:, :size]
            forced = np.maximum(STEP * forced, 1e-300)
            passed_share = np.ones_like(passed)
            together = np.logaddexp(passed[single], np.log(forced))
            passed_share[single] = np.exp(passed[single] - together)
            passed[single] = together
            table[who] = passed
            parts.append((stage, who, single, passes, under, forced, passed_share))
        return table, parts

    def _upwards(self, table: Floats, variances: Variances) -> "_Upwards":
        """What remains to integrate at each level, scaled to at most 1."""
        step, block = _kernel(len(self.grid), variances.step), _kernel(len(self.grid), variances.block)
        row_top = table.max(axis=1, keepdims=True)
        row = np.exp(table - row_top)
        row_seen = np.maximum(row @ step, 1e-300)
        blocks, block_top = _product(row_seen, self.first_row)
        block_seen = np.maximum(blocks @ block, 1e-300)
        requests, request_top = _product(block_seen, self.first_block)
        return _Upwards(row, row_seen, blocks, block_seen, requests, request_top + block_top + float(row_top.sum()))

    def _integrate(self, table: Floats, variances: Variances) -> tuple[float, Floats, Floats]:
        """The log-likelihood, the posterior of each row's t [rows, grid], and derivatives by the variances."""
        step, block = _kernel(len(self.grid), variances.step), _kernel(len(self.grid), variances.block)
        prior = _kernel(len(self.grid), variances.request)[len(self.grid) // 2]
        up = self._upwards(table, variances)
        row, row_seen, blocks, block_seen, requests = up.row, up.row_seen, up.blocks, up.block_seen, up.requests
        total = np.maximum(requests @ prior, 1e-300)
        value = float(np.log(total).sum()) + up.taken_off
        # Back down: the posterior at each level.
        of_request = requests * prior / total[:, None]
        of_block = of_request[self.request] / block_seen
        of_row = ((of_block @ block) * blocks)[self.block] / row_seen
        weight = (of_row @ step) * row
        # A discrete Gaussian obeys the heat equation: its derivative by v is half its second difference.
        by_variance = [
            (requests / total[:, None] * _bend(prior[None])).sum(),
            (of_block * _bend(block_seen)).sum(),
            (of_row * _bend(row_seen)).sum(),
        ]
        return value, weight, 0.5 * np.array(by_variance) / STEP**2


@dataclass(frozen=True, eq=False)
class _Upwards:
    """Likelihoods [..., grid] of rows, blocks and requests, before and after integrating out their own part."""

    row: Floats
    row_seen: Floats
    blocks: Floats
    block_seen: Floats
    requests: Floats
    taken_off: float  # of the log-likelihood, by scaling


def _product(factors: Floats, first: Ints) -> tuple[Floats, float]:
    """Products of consecutive rows, each scaled to at most 1, and the scaling's logarithm."""
    logs = np.add.reduceat(np.log(factors), first, axis=0)
    top = logs.max(axis=1, keepdims=True)
    return np.exp(logs - top), float(top.sum())


def _kernel(size: int, variance: float) -> Floats:
    """The discrete Gaussian between any two grid points."""
    return np.asarray(toeplitz(ive(np.arange(size), variance / STEP**2)), np.float64)


def _bend(values: Floats) -> Floats:
    """Second differences along the grid, 0 beyond it."""
    out = -2.0 * values
    out[:, 1:] += values[:, :-1]
    out[:, :-1] += values[:, 1:]
    return out
