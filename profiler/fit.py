"""Fit a latency model to measured steps, and judge the fit."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..engine.errors import ProfileError
from ..engine.latency import LatencyModel, step_times
from .pieces import Problem, Solution, errors_of, search, solve
from .profile import Fit, HeldOut, KindError, digits
from .samples import (
    FEATURES,
    KINDS_OF_STEPS,
    TOKENS,
    Bools,
    Floats,
    Ints,
    Points,
    Samples,
    joined,
    kinds_of,
    padded,
    points,
)
from .stairs import Stairs, climb

MIN_POINTS = 4

# Bounds for doubts about a fit.
FEW_POINTS = 3  # per coefficient
NOISE = 0.05
DRIFT = 0.03
HELD_OUT_MEDIAN = 0.05  # of all; of a kind for the quartiles and the total time of its steps
HELD_OUT_P95 = 0.20
FEWEST_JUDGED = 5  # steps of a kind


def fit_latency(
    steps: Samples, graph_tokens: int = 0, *, stairs: bool = False, journal: Samples | None = None,
) -> tuple[LatencyModel, Fit]:  # fmt: skip
    """Fit a latency model to the points (medians of repeats) by relative least squares, and judge the fit.

    graph_tokens: decode steps of at most this many tokens were captured, and cost their padding. Host terms are fitted
    if all device times are known; otherwise host_step is part of the other constants. stairs: fit a time per level of
    tokens (stairs.py), not up to three affine pieces. journal: served steps; every second one is fitted too, and the
    others judge the fit in place of held-out points.
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
    solution: Solution
    if stairs:
        solution = climb(Stairs(fitted, not timed, graph_tokens))
    else:
        solution = search(Problem(fitted, not timed, graph_tokens))
    errors = solution.standard_errors()
    host = {"host_step": 0.0, "host_request": 0.0} | ({"host_block": 0.0} if fitted.blocks.any() else {})
    missing = list(solution.unidentified)
    if timed:
        host_times, host_errors = _host(fitted)
        host |= host_times
        errors |= host_errors
        missing += [name for name in host if name not in host_errors]
    else:
        host |= {name: solution.coefficients().get(name, 0.0) for name in host}
        missing.append("host_step")
    model = solution.model(**host)
    residuals = predict(model, fitted.features, fitted.blocks) / fitted.latency - 1.0
    judged, judged_by = _judged(model, judges) if len(judges) else (None, ())
    noise, (drift, drift_error) = _noise(steps), _drift(steps)
    num = solution.num_coefficients + sum(name in errors for name in host if timed)
    # A level has its own points; only linear terms need FEW_POINTS each.
    least_points = FEW_POINTS * num - (FEW_POINTS - 1) * solution.num_levels
    computed = padded(fitted.features, graph_tokens)[:, TOKENS]
    fit = Fit(
        domain=(float(computed.min()), float(computed.max())),
        residual=digits(np.sqrt(np.mean(residuals**2)), 4),
        standard_errors={name: digits(value, 3) for name, value in errors.items()},
        relative_uncertainty=None,
        num_points=len(fitted),
        held_out=judged,
        judged_by=judged_by,
        noise=None if noise is None else digits(noise, 3),
        drift=None if drift is None else digits(drift, 3),
        unidentified=tuple(missing),
        host_or_device=not timed and host["host_request"] > 0,
    )
    return model, replace(fit, doubts=tuple(_doubts(fit, num, least_points, drift_error)))


def split(every: Points) -> Bools:
    """Held-out points: every fifth in feature order without the extremes; none of fewer than ten."""
    place = np.arange(len(every))
    return np.asarray((place % 5 == 2) & (place < len(every) - 1) & (len(every) >= 10), np.bool_)


def predict(model: LatencyModel, features: Floats, blocks: Floats | float = 0.0) -> Floats:
    """`model.step` of many steps (s); features [steps, features]; blocks [steps]: blocks completed."""
    return step_times(model, dict(zip(FEATURES, features.T, strict=True))) + model.host_block * blocks


def _host(fitted: Points) -> tuple[dict[str, float], dict[str, float]]:
    """The host's terms, from latency minus device time, and their standard errors."""
    weight = 1.0 / fitted.latency
    columns = {"host_step": fitted.column("num_forwards")}
    for name, column in (("host_request", fitted.column("batch")), ("host_block", fitted.blocks)):
        ratio = column / fitted.column("num_forwards")
        if ratio.max() > ratio.min():
            columns[name] = column
    table = np.column_stack(list(columns.values())) * weight[:, None]
    target = (fitted.latency - fitted.device) * weight
    values = solve(table, target)
    units = dict(zip(columns, np.eye(len(columns)), strict=True))
    errors = errors_of(table, float(((table @ values - target) ** 2).sum()), units)
    return dict(zip(columns, values.tolist(), strict=True)), errors


def _judged(model: LatencyModel, judges: Points) -> tuple[HeldOut, tuple[KindError, ...]]:
    """The errors of all, and of each kind with enough steps."""
    predicted = predict(model, judges.features, judges.blocks)
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


def _noise(steps: Samples) -> float | None:
    """Between the bursts of shapes that were measured several times, or else within bursts."""
    import pandas as pd  # slow to load

    starts = np.flatnonzero(np.diff(steps.group, prepend=-1))
    bursts = np.array([np.median(burst) for burst in np.split(steps.latency, starts[1:])])
    for group, latency in ((steps.group[starts], bursts), (steps.group, steps.latency)):
        spread = pd.Series(latency / _mean(group, latency)).groupby(group).std().dropna()
        if len(spread):
            return float(spread.median())
    return None


def _mean(group: Ints, values: Floats) -> Floats:
    """Each repeat's mean over its shape."""
    return (np.bincount(group, values) / np.maximum(np.bincount(group), 1))[group]


def _drift(steps: Samples) -> tuple[float | None, float]:
    """The relative change of repeats over the sweep, by the device's time where it is known, and its standard error."""
    progress, times = np.arange(len(steps)) / max(1, len(steps) - 1), np.fmin(steps.device, steps.latency)
    x, y = progress - _mean(steps.group, progress), times / _mean(steps.group, times) - 1.0
    degrees = len(steps) - len(np.unique(steps.group)) - 1
    # Repeats back to back show no drift.
    if degrees < 3 or (x**2).mean() < 1e-3:
        return None, np.inf
    slope = float((x * y).sum() / (x**2).sum())
    error = float(np.sqrt(((y - slope * x) ** 2).sum() / degrees / (x**2).sum()))
    # The slope of few, noisy repeats can exceed the whole latency.
    return max(-1.0, slope), error


def _doubts(fit: Fit, num: int, least_points: int, drift_error: float) -> Iterator[str]:
    """num: coefficients. least_points: expected."""
    if (fit.num_points or 0) < least_points:
        yield f"too few points: {fit.num_points} step shapes for {num} coefficients, expected at least {least_points}"
    if fit.noise is not None and fit.noise > NOISE:
        yield f"noise: repeats of a step spread by {fit.noise:.1%}, expected at most {NOISE:.0%}"
    if fit.drift is not None and abs(fit.drift) > max(DRIFT, 3 * drift_error):
        yield (
            f"drift: repeats took {fit.drift:+.1%} by the end (standard error {drift_error:.1%}), expected within "
            f"{DRIFT:.0%}: the device's clocks or its load changed"
        )
    judged = fit.held_out
    if judged is None:
        yield f"too few points: none of {fit.num_points} could be held out, expected at least 10 to measure"
    elif (judged.median > HELD_OUT_MEDIAN or judged.p95 > HELD_OUT_P95) and all(e.doubted for e in fit.judged_by):
        yield (
            f"held-out error: steps of every kind are off, by {judged.median:.1%} in the median and {judged.p95:.1%} "
            f"at the 95th percentile, expected at most {HELD_OUT_MEDIAN:.0%} and {HELD_OUT_P95:.0%}"
        )
