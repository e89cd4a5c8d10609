"""Fit a latency model to measured steps, and judge the fit.

The layers' time is a monotone table over tokens, the other terms are products of features, and no coefficient is below
0: one problem of nonnegative least squares, whose unknowns are the table's rises and the terms (isotonic regression
with terms). Points on the launch floor are chosen by alternation from several starts. A captured graph is priced by its
bucket and never on the floor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import nnls

from ..engine.errors import ProfileError
from ..engine.latency import LatencyModel, step_times
from .profile import Fit, HeldOut, KindError, digits, rounded
from .samples import FEATURES, KINDS_OF_STEPS, Bools, Floats, Points, Samples, joined, kinds_of, points

MIN_POINTS = 4
KNOTS = 1.1  # least ratio of two knots' tokens
KNOT_POINTS = 4  # least points for each knot
STARTS = (0.15, 0.4, 0.7)  # initial shares of points on the floor
ROUNDS = 8
COLLINEAR = 0.01  # least unexplained share of a column, given those before
RIDGE = 1e-5  # divides a rise that no point identifies among knots in proportion to their distance
LINEAR = ("attention", "kv_read", "head", "sample")
HOST = ("host_step", "host_request")  # never hidden by the floor
DENSE = "dense_attention"  # time per pair beyond a key's first DENSE_FROM queries
MOST_DENSE = 100.0  # times the time of another pair

# Bounds for doubts about a fit.
FEW_POINTS = 3  # per coefficient
HELD_OUT_MEDIAN = 0.05  # of all; of a kind for the quartiles and the total time of its steps
HELD_OUT_P95 = 0.20
FEWEST_JUDGED = 5  # steps of a kind


def fit_latency(steps: Samples, graph_tokens: int = 0, *, journal: Samples | None = None) -> tuple[LatencyModel, Fit]:
    """Fit a latency model to the points (medians of repeats) by relative least squares, and judge the fit.

    graph_tokens: decode steps of at most this many tokens were captured, and cost their padding. Host terms are fitted
    if all device times are known; otherwise host_step is part of the other constants. journal: served steps; every
    second one is fitted too, and the others judge the fit in place of held-out points.
    """
    if journal is None:
        every = points(steps)
        judge = split(every)
        fitted, judges = every[~judge], every[judge]
    else:
        fitted, judges = joined(points(steps), points(journal[::2])), journal[1::2]
    if len(fitted) < MIN_POINTS:
        raise ProfileError(f"{len(fitted)} step shapes were measured to fit to, expected at least {MIN_POINTS}")
    timed = not np.isnan(fitted.device).any()
    problem = Problem(fitted, graph_tokens, timed)
    solution = solve(problem)
    terms, errors = solution.terms, solution.standard_errors()
    if timed:
        host = _host_columns(fitted)
        table = np.column_stack(list(host.values())) / fitted.latency[:, None]
        target = (fitted.latency - fitted.device) / fitted.latency
        values = _least_squares(table, target)
        terms = terms | dict(zip(host, values.tolist(), strict=True))
        places = {name: i for i, name in enumerate(host)}
        errors |= _errors(table, float(((table @ values - target) ** 2).sum()), places)
    model = solution.model(terms)
    residuals = predict(model, fitted.features) / fitted.latency - 1.0
    judged, judged_by = _judged(model, judges) if len(judges) else (None, ())
    names = dict.fromkeys((*problem.linear, "host_step", "host_request", "launch"))
    # A knot has its own points; only terms need FEW_POINTS each.
    least_points = FEW_POINTS * len(errors) + len(problem.knots)
    fit = Fit(
        domain=(float(problem.num_tokens.min()), float(problem.num_tokens.max())),
        residual=digits(np.sqrt(np.mean(residuals**2)), 4),
        standard_errors={name: digits(value, 3) for name, value in errors.items()},
        relative_uncertainty=None,
        num_points=len(fitted),
        held_out=judged,
        judged_by=judged_by,
        unidentified=tuple(name for name in names if name not in errors and name != DENSE),
    )
    return model, replace(fit, doubts=tuple(_doubts(fit, least_points)))


class Problem:
    """Points to fit as columns, weighted so that a residual is relative to the latency.

    A term's column is what steps cost if it is 1 and all others are 0: padded where a graph is captured.
    """

    def __init__(self, fitted: Points, graph_tokens: int, timed: bool) -> None:
        """timed: fit the device's time, not the latency."""
        free = LatencyModel(((0.0, 0.0),), 0.0, graph_tokens=graph_tokens, dense=0.0)

        def column(name: str, **others: float) -> Floats:
            terms: Any = {name: 1.0, **others}
            return predict(replace(free, **terms), fitted.features)

        self.graph_tokens, self.weight = graph_tokens, 1.0 / fitted.latency
        self.captured = np.asarray(column("launch") == 0.0, np.bool_)
        self.target = fitted.latency * self.weight
        names = [*LINEAR]
        if timed:
            self.target = fitted.device * self.weight
            names.append("sequence")
        self.forwards, self.num_tokens = column("host_step"), column("slope")
        self.tokens = self.num_tokens / self.forwards
        self.knots = _knots(self.tokens)
        self.linear = {name: column(name) for name in names}
        dense = column("attention", dense=1.0) - self.linear["attention"]
        if dense.any():
            self.linear[DENSE] = dense
        if not timed:
            self.linear |= {name: values for name, values in _host_columns(fitted).items() if name != "host_step"}

    def layers(self) -> Floats:
        """Columns of the table: its first height, and the rise to each further knot."""
        widths = np.diff(self.knots)
        rises = np.clip((self.tokens[:, None] - self.knots[:-1]) / widths, 0.0, 1.0)
        return np.column_stack([np.ones(len(self.tokens)), rises]) * self.forwards[:, None]

    def columns(self, names: tuple[str, ...], floor: Bools) -> Floats:
        """The design matrix: the table, `names`, launch. Points on the floor show host terms and launch alone."""
        table = np.column_stack([self.layers(), *(self.linear[name] for name in names), np.zeros(len(self.tokens))])
        of_host = [name in HOST for name in names]
        table[np.ix_(floor, ~np.array([*[False] * len(self.knots), *of_host, True]))] = 0.0
        table[floor, -1] = self.forwards[floor]
        return np.asarray(table * self.weight[:, None], np.float64)

    def identified(self, floor: Bools) -> tuple[str, ...]:
        """Terms whose columns off the floor are no combinations of the table and of the terms before."""
        weight = self.weight[~floor, None]
        basis = np.linalg.qr(np.column_stack([self.forwards, self.tokens * self.forwards])[~floor] * weight)[0]
        names = []
        for name, column in self.linear.items():
            values = column[~floor] * weight[:, 0]
            residual = values - basis @ (basis.T @ values)
            size = np.linalg.norm(residual)
            if size > COLLINEAR * np.linalg.norm(values):
                names.append(name)
                basis = np.column_stack([basis, residual / size])
        return tuple(names)


@dataclass(frozen=True)
class Solution:
    """Coefficients (the first knot's height, rises, names, launch)."""

    problem: Problem
    names: tuple[str, ...]
    values: Floats

    @property
    def terms(self) -> dict[str, float]:
        return dict(zip(self.names, self.values[len(self.problem.knots) : -1].tolist(), strict=True))

    @cached_property
    def floor(self) -> Bools:
        """Points whose device time is below the launch time."""
        problem, values = self.problem, self.values.copy()
        values[len(problem.knots) : -1] *= [name not in HOST for name in self.names]
        device = problem.columns(self.names, np.zeros(len(problem.tokens), np.bool_)) @ values
        return np.asarray((device < self.values[-1] * problem.forwards * problem.weight) & ~problem.captured, np.bool_)

    @cached_property
    def squares(self) -> float:
        """Squared relative errors."""
        return float(((self.problem.columns(self.names, self.floor) @ self.values - self.problem.target) ** 2).sum())

    @property
    def bic(self) -> float:
        """The floor counts three times, as its points are chosen too: prefer a flat table that fits as well."""
        n = len(self.problem.tokens)
        return float(n * np.log(max(self.squares, 1e-12 * n) / n) + 3 * self.floor.any() * np.log(n))

    def standard_errors(self) -> dict[str, float]:
        """Standard errors of the terms, from the linearised fit and its residuals."""
        first = len(self.problem.knots)
        places = {name: first + i for i, name in enumerate(self.names) if name != DENSE}
        if self.floor.any():
            places["launch"] = len(self.values) - 1
        return _errors(self.problem.columns(self.names, self.floor), self.squares, places)

    def model(self, terms: Mapping[str, float]) -> LatencyModel:
        """The latency model with these terms."""
        knots = self.problem.knots
        heights = np.cumsum(self.values[: len(knots)])
        half = int(np.searchsorted(knots, knots[-1] / 2))  # the upper half's slope goes on beyond the last knot
        slope = (heights[-1] - heights[half]) / max(1.0, knots[-1] - knots[half])
        stored: dict[str, Any] = {name: value for name, value in terms.items() if name != DENSE}
        if dense := terms.get(DENSE):
            attention = max(terms.get("attention", 0.0), dense / MOST_DENSE)
            stored |= {"attention": attention, "dense": dense / attention}
        if self.floor.any():
            stored["launch"] = float(self.values[-1])
        table = tuple(zip(knots.tolist(), heights.tolist(), strict=True))
        return rounded(LatencyModel(table, slope, graph_tokens=self.problem.graph_tokens, **stored))


def solve(problem: Problem) -> Solution:
    """The solution of least BIC, without and with points on the launch floor."""
    nowhere = np.zeros(len(problem.tokens), np.bool_)
    best = free = _solved(problem, nowhere)
    launched = ~problem.captured
    device = problem.columns(free.names, nowhere) @ free.values / problem.weight / problem.forwards
    for share in STARTS if launched.any() else ():
        floor = launched & (device <= np.quantile(device[launched], share))
        for _ in range(ROUNDS):
            solution = _solved(problem, floor)
            if solution.floor.any() and solution.bic < best.bic:
                best = solution
            if (solution.floor == floor).all() or solution.floor.all():
                break
            floor = solution.floor
    return best


def _solved(problem: Problem, floor: Bools) -> Solution:
    names = problem.identified(floor)
    table = problem.columns(names, floor)
    widths = np.diff(problem.knots, prepend=0.0)
    ridge = np.zeros((len(widths), table.shape[1]))
    np.fill_diagonal(ridge, RIDGE * np.linalg.norm(table[:, : len(widths)], axis=0).max() / np.sqrt(widths))
    values = _least_squares(np.vstack([table, ridge]), np.append(problem.target, np.zeros(len(widths))))
    return Solution(problem, names, values)


def _knots(tokens: Floats) -> Floats:
    """Numbers of tokens where the table bends: measured ones, the first and the last among them."""
    every, ratio = np.unique(tokens), KNOTS
    while True:
        knots = [every[-1]]
        for level in every[-2::-1]:
            if level * ratio <= knots[-1] or level == every[0]:
                knots.append(level)
        if len(knots) <= max(2, len(tokens) // KNOT_POINTS):
            return np.array(knots[::-1])
        ratio **= 1.5


def _host_columns(fitted: Points) -> dict[str, Floats]:
    """The features of host terms that vary."""
    forwards = fitted.column("num_forwards")
    columns = {"host_step": forwards}
    rows = fitted.column("batch")
    if (rows / forwards).max() > (rows / forwards).min():
        columns["host_request"] = rows
    return columns


def _least_squares(table: Floats, target: Floats) -> Floats:
    """Coefficients of at least 0 whose columns sum to the target."""
    lengths = _lengths(table)
    return np.asarray(nnls(table / lengths, target)[0] / lengths, np.float64)


def _errors(table: Floats, squares: float, places: Mapping[str, int]) -> dict[str, float]:
    """Standard errors of the columns' coefficients, after a fit with these squared residuals."""
    lengths = _lengths(table)
    inverse = np.linalg.pinv((table / lengths).T @ (table / lengths), rcond=1e-12)
    variances = squares / max(1, len(table) - int(table.any(axis=0).sum())) * np.diag(inverse) / lengths**2
    return {name: float(np.sqrt(max(0.0, variances[place]))) for name, place in places.items()}


def _lengths(table: Floats) -> Floats:
    """Lengths of the columns, 1 for columns of 0."""
    lengths = np.linalg.norm(table, axis=0)
    return np.where(lengths > 0.0, lengths, 1.0)


def split(every: Points) -> Bools:
    """Held-out points: every fifth in feature order without the extremes; none of fewer than ten."""
    place = np.arange(len(every))
    return np.asarray((place % 5 == 2) & (place < len(every) - 1) & (len(every) >= 10), np.bool_)


def predict(model: LatencyModel, features: Floats) -> Floats:
    """`model.step` of many steps (s); features [steps, features]."""
    return step_times(model, dict(zip(FEATURES, features.T, strict=True)))


def _judged(model: LatencyModel, judges: Points) -> tuple[HeldOut, tuple[KindError, ...]]:
    """The errors of all, and of each kind with enough steps."""
    predicted = predict(model, judges.features)
    off = predicted / judges.latency - 1.0
    kinds = kinds_of(judges.column("prefill_tokens") > 0, judges.column("tokens"), judges.column("batch"))
    counts = np.bincount(kinds, minlength=len(KINDS_OF_STEPS))
    errors = []
    for kind in np.flatnonzero(counts >= FEWEST_JUDGED).tolist():
        rows = kinds == kind
        by_time = predicted[rows].sum() / judges.latency[rows].sum() - 1.0
        low, middle, high = np.quantile(off[rows], (0.25, 0.5, 0.75))
        p95 = np.quantile(np.abs(off[rows]), 0.95)
        # A quarter of the steps beyond the bound on one side: the steps of the other side may hide it in a median.
        doubted = max(-low, high, abs(by_time)) > HELD_OUT_MEDIAN or p95 > HELD_OUT_P95
        values = {"median": middle, "by_time": by_time, "low": low, "high": high, "p95": p95}
        rounded = {name: digits(value, 4) for name, value in values.items()}
        errors.append(KindError(KINDS_OF_STEPS[kind], int(counts[kind]), **rounded, doubted=bool(doubted)))
    median, p95 = np.quantile(np.abs(off), (0.5, 0.95))
    return HeldOut(len(judges), digits(median, 4), digits(p95, 4)), tuple(errors)


def _doubts(fit: Fit, least_points: int) -> Iterator[str]:
    """least_points: expected."""
    if (fit.num_points or 0) < least_points:
        yield f"too few points: {fit.num_points} step shapes, expected at least {least_points}"
    judged = fit.held_out
    if judged is None:
        yield f"too few points: none of {fit.num_points} could be held out, expected at least 10 to measure"
    elif (judged.median > HELD_OUT_MEDIAN or judged.p95 > HELD_OUT_P95) and all(e.doubted for e in fit.judged_by):
        yield (
            f"held-out error: steps of every kind are off, by {judged.median:.1%} in the median and {judged.p95:.1%} "
            f"at the 95th percentile, expected at most {HELD_OUT_MEDIAN:.0%} and {HELD_OUT_P95:.0%}"
        )
