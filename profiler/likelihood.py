"""The log-likelihood of a commit log under a commit model.

A mask at distance d passes with log-odds l[d] + t; t sums the normal parts of request, block and step and the stage's
gain (engine/commits.py). Given t, a step that computes masks D and commits C has the likelihood

    prod_C p(d, t) prod_D-C (1 - p(d, t)) = exp(sum_C (l[d] + t)) N(t),    N(t) = prod_D (1 - p(d, t))

A single commit i may have been forced: no mask passed, and i was the likeliest. That adds

    integral from t to infinity of p(i, x) N(x) dx .

t lies on a grid; the parts are integrated out in the order step, block, request. Normals on the grid are discrete
Gaussians exp(-v) I_n(v) (Lindeberg 1990), of exact variance however narrow.
"""

from dataclasses import dataclass

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
        self.first_row = np.flatnonzero(np.diff(block, prepend=-1))
        self.first_block = np.flatnonzero(np.diff(log.request[self.first_row], prepend=-1))
        self.grid = np.arange(-round(REACH / STEP), round(REACH / STEP) + 1) * STEP
        self.wide_grid = np.arange(-round(REACH / STEP), round(BEYOND / STEP) + 1) * STEP

    def value(self, log_odds: Floats, gain: float, variances: Variances) -> float:
        """The log-likelihood; log_odds [block_length]: by distance from the frontier."""
        size = len(self.grid)
        table = self._of_rows(log_odds, gain)
        top = table.max(axis=1, keepdims=True)
        rows = np.exp(table - top) @ _kernel(size, variances.step)
        blocks, block_top = _product(rows, self.first_row)
        requests, request_top = _product(blocks @ _kernel(size, variances.block), self.first_block)
        total = np.maximum(requests @ _kernel(size, variances.request)[size // 2], 1e-300)
        return float(np.log(total).sum() + top.sum()) + block_top + request_top

    def _of_rows(self, log_odds: Floats, gain: float) -> Floats:
        """Each row's log-likelihood at each t [rows, grid]."""
        size = len(self.grid)
        table = np.empty((len(self.num), size))
        for stage, who in self.stages:
            t = self.wide_grid + gain * stage
            # log N, and the log-odds of the whole commit
            none = -self.computed[who] @ np.logaddexp(0.0, log_odds[:, None] + t)
            passed = none[:, :size] + (self.committed[who] @ log_odds)[:, None] + self.num[who, None] * t[:size]
            single = np.flatnonzero(self.num[who] == 1)
            # The integrand, then its integral by the trapezium rule.
            under = expit(log_odds[self.lone[who[single]], None] + t) * np.exp(none[single])
            forced = np.cumsum(under[:, ::-1], axis=1)[:, ::-1][:, :size] - 0.5 * under[:, :size]
            passed[single] = np.logaddexp(passed[single], np.log(np.maximum(STEP * forced, 1e-300)))
            table[who] = passed
        return table


def _product(factors: Floats, first: Ints) -> tuple[Floats, float]:
    """Products of consecutive rows, each scaled to at most 1, and the scaling's logarithm."""
    logs = np.add.reduceat(np.log(np.maximum(factors, 1e-300)), first, axis=0)
    top = logs.max(axis=1, keepdims=True)
    return np.exp(logs - top), float(top.sum())


def _kernel(size: int, variance: float) -> Floats:
    """The discrete Gaussian between any two grid points."""
    return np.asarray(toeplitz(ive(np.arange(size), variance / STEP**2)), np.float64)
