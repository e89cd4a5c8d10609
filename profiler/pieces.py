"""The search behind a latency fit: pieces with free bends, a launch floor, coefficients of at least 0.

Given the bends (tokens where pieces meet) and the points on the floor, the model is linear. Bends are searched on a
grid, floor points by alternation from several starts, and the best is polished with free bends; BIC chooses the number
of pieces. A captured graph is priced by its bucket and never on the floor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from ..engine.latency import LatencyModel
from .hardware import DENSE_FROM
from .profile import rounded
from .samples import Bools, Floats, Points, captured, padded

MAX_PIECES = 3
GRID = 5  # candidate bends at quantiles, and twice as many at equal ratios
STARTS = (0.15, 0.4, 0.7)  # initial shares of points on the floor
ROUNDS = 8
POLISHED = 2  # best candidates per number of pieces, with and without a floor
SEARCHED = 1500  # points in the grid search; the polish uses all
COLLINEAR = 0.01  # least unexplained share of a column, given those before

LINEAR = {"attention": "sum_q_kv", "kv_read": "sum_kv", "head": "head_rows", "sample": "sampled_rows"}
HOST = ("host_request", "host_block")  # never hidden by the floor
# Kernels are faster over many queries: extra time per pair of a key's first DENSE_FROM queries.
SHORT = "short_attention"


class Problem:
    """Points to fit, weighted so that a residual is relative to the latency."""

    def __init__(self, fitted: Points, with_host: bool, graph_tokens: int = 0) -> None:
        """with_host: fit the latency, not the device's time."""
        self.points, self.with_host, self.graph_tokens = fitted, with_host, graph_tokens
        self.captured = captured(fitted.features, graph_tokens)
        computed = replace(fitted, features=padded(fitted.features, graph_tokens))
        self.forwards = computed.column("num_forwards")
        self.tokens = computed.column("tokens") / self.forwards
        self.weight = 1.0 / fitted.latency
        self.target = (fitted.latency if with_host else fitted.device) * self.weight
        self.linear = {name: computed.column(feature) for name, feature in LINEAR.items()}
        short = np.minimum(self.linear["attention"], DENSE_FROM * self.linear["kv_read"])
        dense = self.linear["attention"] > short
        if dense.any() and not dense.all():
            self.linear[SHORT] = short
        if with_host:
            self.linear["host_request"] = computed.column("batch")
            if fitted.blocks.any():
                self.linear["host_block"] = fitted.blocks
        self._kept: tuple[tuple[bytes, tuple[str, ...]], Floats] | None = None

    def columns(self, bends: Floats, names: tuple[str, ...], floor: Bools) -> Floats:
        """The design matrix: base, a slope for each piece, `names`, launch."""
        table = self._off_the_floor(bends, names).copy()
        hidden = np.array([True] * (1 + len(bends)) + [name not in HOST for name in names] + [False])
        table[np.ix_(floor, hidden)] = 0.0
        table[floor, -1] = (self.forwards * self.weight)[floor]
        return table

    def _off_the_floor(self, bends: Floats, names: tuple[str, ...]) -> Floats:
        """`columns` without floor points; cached for the last bends."""
        key = bends.tobytes(), names
        if self._kept is None or self._kept[0] != key:
            linear = [self.linear[name] for name in names]
            launch = np.zeros(len(self.forwards))
            self._kept = key, np.column_stack([*self._layers(bends), *linear, launch]) * self.weight[:, None]
        return self._kept[1]

    def _layers(self, bends: Floats) -> tuple[Floats, Floats]:
        rising = np.clip(self.tokens[:, None] - bends, 0.0, np.append(np.diff(bends), np.inf))
        return self.forwards, self.forwards[:, None] * rising

    def thinned(self) -> "Problem":
        """The problem with at most SEARCHED points."""
        keep = np.unique(np.linspace(0, len(self.points) - 1, SEARCHED).astype(np.int64))
        few = Problem(self.points[keep], self.with_host, self.graph_tokens)
        return few if len(self.points) > SEARCHED else self


@dataclass(frozen=True)
class Solution:
    """Coefficients (base, slopes, names, launch) of the pieces that begin at `bends`."""

    problem: Problem
    bends: Floats
    names: tuple[str, ...]
    values: Floats
    unidentified: tuple[str, ...] = ()

    @cached_property
    def floor(self) -> Bools:
        """Points whose device time is below the launch time."""
        nowhere = np.zeros(len(self.problem.points), np.bool_)
        device = self.problem.columns(self.bends, self.names, nowhere)
        for name in HOST:
            if name in self.names:
                device[:, 1 + len(self.bends) + self.names.index(name)] = 0.0
        launch = self.values[-1] * self.problem.forwards * self.problem.weight
        return np.asarray((device @ self.values < launch) & ~self.problem.captured, np.bool_)

    def residuals(self) -> Floats:
        """predicted / measured - 1."""
        out: Floats = self.problem.columns(self.bends, self.names, self.floor) @ self.values - self.problem.target
        return out

    @property
    def floored(self) -> bool:
        return bool(self.floor.any())

    @cached_property
    def squares(self) -> float:
        return float((self.residuals() ** 2).sum())

    @property
    def num_coefficients(self) -> int:
        """Base, slopes, bends but the first, names, and the floor if points are on it."""
        return 2 * len(self.bends) + len(self.names) + int(self.floored)

    @property
    def num_levels(self) -> int:
        """Coefficients that are times of single levels (stairs.py)."""
        return 0

    @property
    def bic(self) -> float:
        n = len(self.problem.points)
        # The floor counts three times, as its points are chosen too: prefer a flat piece that fits as well.
        num = self.num_coefficients + 2 * int(self.floored)
        return float(n * np.log(max(self.squares, 1e-12 * n) / n) + num * np.log(n))

    def coefficients(self) -> dict[str, float]:
        return dict(zip(self.names, self.values[1 + len(self.bends) : -1].tolist(), strict=True))

    def model(self, **host: float) -> LatencyModel:
        """host: its terms (s)."""
        coefficients, num = self.coefficients(), len(self.bends)
        terms: dict[str, Any] = {name: coefficients.get(name, 0.0) for name in LINEAR} | host
        if SHORT in coefficients:
            terms |= {"dense_from": DENSE_FROM, "dense_attention": terms["attention"]}
            terms["attention"] += coefficients[SHORT]
        heights = self.values[0] + np.cumsum(np.append(0.0, np.diff(self.bends) * self.values[1:num]))
        return rounded(
            LatencyModel(
                knots=tuple(zip(self.bends, heights, strict=True)), slope=self.values[num],
                launch=self.values[-1] if self.floored else 0.0, graph_tokens=self.problem.graph_tokens, **terms,
            )
        )  # fmt: skip

    def jacobian(self) -> Floats:
        """Derivatives by the coefficients, then by the bends but the first."""
        table = self.problem.columns(self.bends, self.names, floor := self.floor)
        slopes = self.values[1 : 1 + len(self.bends)]
        above = (self.problem.tokens[:, None] > self.bends[1:]) & ~floor[:, None]
        turns = above * (slopes[:-1] - slopes[1:]) * (self.problem.forwards * self.problem.weight)[:, None]
        return np.column_stack([table, turns])

    def standard_errors(self) -> dict[str, float]:
        """Standard errors by the coefficients' profile names, from the linearised fit and its residuals."""
        table = self.jacobian()
        stated, launch = self.stated(table.shape[1]), len(self.values) - 1
        if table[:, launch].any():
            stated["launch"] = np.eye(table.shape[1])[launch]
        return errors_of(table, self.squares, stated)

    def stated(self, size: int) -> dict[str, Floats]:
        """Profile coefficients except launch, as combinations of `size` coefficients and bends."""
        # A knot's height is the base plus all rises before it.
        num = len(self.bends)
        slopes, unit = self.values[1 : 1 + num], np.eye(size)
        stated: dict[str, Floats] = {}
        height = unit[0].copy()
        for k in range(num):
            if k:
                index = len(self.values) + k - 1  # this bend's index among the coefficients
                height = height + unit[k] * (self.bends[k] - self.bends[k - 1]) + unit[index] * slopes[k - 1]
                if k > 1:
                    height = height - unit[index - 1] * slopes[k - 1]
                stated[f"knots[{k}][0]"] = unit[index]
            stated[f"knots[{k}][1]"] = height
        stated["slope"] = unit[num]
        stated |= {name: unit[1 + num + i] for i, name in enumerate(self.names) if name != SHORT}
        if SHORT in self.names:
            stated["dense_attention"] = stated.get("attention", np.zeros(size))
            stated["attention"] = stated["dense_attention"] + unit[1 + num + self.names.index(SHORT)]
        return stated


def search(problem: Problem) -> Solution:
    """The solution of least BIC with one to three pieces."""
    few = problem.thinned()
    names = _identified(few, np.zeros(len(few.points), np.bool_))
    first, last = few.tokens.min(), few.tokens.max()
    levels = np.unique(few.tokens)
    even = np.quantile(levels, np.linspace(0, 1, GRID + 2)[1:-1])
    grid = np.unique(np.append(even, np.geomspace(max(first, 1.0), max(last, 2.0), 2 * GRID + 2)[1:-1]))
    grid = grid[(grid > levels[0]) & (grid < levels[-1])]
    best: Solution | None = None
    for pieces in range(1, MAX_PIECES + 1):
        if len(levels) < 2 * pieces:  # a piece needs two levels
            break
        candidates = [
            s for bends in combinations(grid, pieces - 1) for s in _settle(few, np.array([first, *bends]), names)
        ]
        for floored in (False, True):
            kind = (s for s in candidates if s.floored == floored)
            for candidate in sorted(kind, key=lambda s: s.squares)[:POLISHED]:
                polished = _polish(replace(candidate, problem=problem))
                if best is None or polished.bic < best.bic:
                    best = polished
    assert best is not None
    return _without_unidentified(best, tuple(problem.linear))


def _settle(problem: Problem, bends: Floats, names: tuple[str, ...]) -> list[Solution]:
    """The best coefficients for these bends, without and with a floor, by alternation."""
    nowhere = np.zeros(len(problem.points), np.bool_)
    free = Solution(problem, bends, names, _solve(problem, bends, names, nowhere))
    device = problem.columns(bends, names, nowhere) @ free.values / problem.weight / problem.forwards
    launched = ~problem.captured
    best: Solution | None = None
    for share in STARTS if launched.any() else ():
        floor = launched & (device <= np.quantile(device[launched], share))
        for _ in range(ROUNDS):
            solution = Solution(problem, bends, names, _solve(problem, bends, names, floor))
            again = solution.floor
            if again.any() and (best is None or solution.squares < best.squares):
                best = solution
            if (again == floor).all() or again.all():
                break
            floor = again
    return [free] if best is None else [free, best]


def _solve(problem: Problem, bends: Floats, names: tuple[str, ...], floor: Bools) -> Floats:
    return solve(problem.columns(bends, names, floor), problem.target)


def solve(table: Floats, target: Floats) -> Floats:
    """Coefficients of at least 0 whose columns sum to the target, by least squares."""
    scale = _lengths(table)
    return np.asarray(nnls(table / scale, target)[0] / scale, np.float64)


def errors_of(table: Floats, squares: float, stated: Mapping[str, Floats]) -> dict[str, float]:
    """Standard errors of combinations of the columns' coefficients, after a fit with these squared residuals."""
    scale = _lengths(table)
    inverse = np.linalg.pinv((table / scale).T @ (table / scale), rcond=1e-12)
    covariance = squares / max(1, len(table) - int(table.any(axis=0).sum())) * inverse / np.outer(scale, scale)
    return {name: float(np.sqrt(max(0.0, float(v @ covariance @ v)))) for name, v in stated.items()}


def _lengths(table: Floats) -> Floats:
    """Lengths of the columns, 1 for columns of 0."""
    lengths = np.linalg.norm(table, axis=0)
    return np.where(lengths > 0.0, lengths, 1.0)


def _polish(start: Solution) -> Solution:
    """Free the bends, each between its neighbours."""
    problem, num = start.problem, len(start.values)
    bends = start.bends
    edges = np.sqrt(bends[1:] * np.append(bends[2:], problem.tokens.max()))
    low = np.append(np.zeros(num), np.maximum(np.append(bends[:1], edges[:-1]), bends[0] * 1.0001)[: len(bends) - 1])
    high = np.append(np.full(num, np.inf), np.maximum(edges, low[num:] * 1.001))

    def solution(x: Floats) -> Solution:
        return Solution(problem, np.append(bends[:1], x[num:]), start.names, x[:num])

    def residuals(x: Floats) -> Floats:
        return solution(x).residuals()

    def jacobian(x: Floats) -> Floats:
        return solution(x).jacobian()

    x = np.clip(np.append(start.values, bends[1:]), low, high)
    optimum = least_squares(
        residuals, x, jacobian, bounds=(low, high), x_scale=_scale(start),
        xtol=1e-10, ftol=1e-10, gtol=1e-12, max_nfev=60,
    )  # fmt: skip
    polished = solution(optimum.x)
    return polished if polished.bic <= start.bic else start


def _scale(start: Solution) -> Floats:
    """What changes a typical point by its whole latency, for each coefficient and bend."""
    norms = np.linalg.norm(start.jacobian(), axis=0) / np.sqrt(len(start.problem.points))
    norms[norms == 0.0] = 1.0
    return np.asarray(1.0 / norms, np.float64)


def _without_unidentified(solution: Solution, candidates: tuple[str, ...]) -> Solution:
    """Refit without coefficients that only floor points identify."""
    floor = solution.floor
    names = _identified(solution.problem, floor)
    if names != solution.names:
        values = _solve(solution.problem, solution.bends, names, floor)
        solution = _polish(Solution(solution.problem, solution.bends, names, values))
    missing = [name for name in candidates if name not in (*names, SHORT)] + (
        [] if solution.floor.any() else ["launch"]
    )
    return replace(solution, unidentified=tuple(missing))


def _identified(problem: Problem, floor: Bools) -> tuple[str, ...]:
    """Coefficients whose columns are no combinations of tokens and earlier ones."""
    off_floor = ~floor
    basis = (
        np.column_stack([problem.forwards, problem.tokens * problem.forwards])[off_floor]
        * problem.weight[off_floor, None]
    )
    basis = np.linalg.qr(basis)[0]
    names = []
    for name, column in problem.linear.items():
        values = (column * problem.weight)[off_floor]
        residual = values - basis @ (basis.T @ values)
        size = np.linalg.norm(residual)
        if size > COLLINEAR * np.linalg.norm(values):
            names.append(name)
            basis = np.column_stack([basis, residual / size])
    return tuple(names)
