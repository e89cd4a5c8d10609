"""Fit a latency model to measured steps, and judge the fit."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from ..engine.errors import ProfileError
from ..engine.latency import LatencyModel, step_times
from .pieces import Problem, Solution, search
from .profile import Fit, HeldOut, digits
from .samples import FEATURES, Bools, Floats, Points, Samples, padded, points
from .stairs import Stairs, climb, traffic

MIN_POINTS = 4

# Bounds for doubts about a fit.
FEW_POINTS = 3  # per coefficient
NOISE = 0.05
DRIFT = 0.03
HELD_OUT_MEDIAN = 0.05
HELD_OUT_P95 = 0.20

DOMAINS = ("tokens", "batch", "prefill_tokens", "head_rows")


def fit_latency(
    taken: Samples, graph_tokens: int = 0, *, stairs: bool = False, journal: Samples | None = None,
) -> tuple[LatencyModel, Fit]:  # fmt: skip
    """Fit a latency model to the points (medians of repeats) by relative least squares, and judge the fit.

    graph_tokens: decode steps of at most this many tokens were captured, and cost their padding. Host terms are fitted
    if all device times are known; otherwise host_step is part of the other constants. stairs: fit a time per level of
    tokens (stairs.py), not up to three affine pieces. journal: served steps, which judge the fit in place of held-out
    points and weight the levels.
    """
    every = points(taken)
    judge = split(every) if journal is None else np.zeros(len(every), np.bool_)
    fitted = every[~judge]
    if len(fitted) < MIN_POINTS:
        raise ProfileError(f"{len(fitted)} step shapes were measured to fit to, expected at least {MIN_POINTS}")
    timed = not np.isnan(fitted.device).any()
    target = fitted.device if timed else fitted.latency
    solution: Solution
    if stairs:
        share = None if journal is None else traffic(fitted, journal, graph_tokens)
        solution = climb(Stairs(fitted, target, not timed, graph_tokens, share))
    else:
        solution = search(Problem(fitted, target, not timed, graph_tokens))
    errors = solution.standard_errors()
    host = {"host_step": 0.0, "host_request": 0.0} | ({"host_block": 0.0} if fitted.blocks.any() else {})
    missing = list(solution.unidentified)
    if timed:
        found, host_errors = _host(fitted)
        host |= found
        errors |= host_errors
        missing += [name for name in host if name not in host_errors]
    else:
        host |= {name: solution.coefficients().get(name, 0.0) for name in host}
        missing.append("host_step")
    model = solution.model(**host)
    residuals = predict(model, fitted.features, fitted.blocks) / fitted.latency - 1.0
    judged = None
    if judge.any() or journal is not None:
        others = every[judge] if journal is None else journal
        off = np.abs(predict(model, others.features, others.blocks) / others.latency - 1.0)
        judged = HeldOut(len(others), digits(np.median(off), 4), digits(np.quantile(off, 0.95), 4))
    noise, (drift, drift_error) = _noise(every), _drift(taken)
    num = solution.num_coefficients + sum(name in errors for name in host if timed)
    # A level has its own points; only linear terms need FEW_POINTS each.
    wanted = FEW_POINTS * num - (FEW_POINTS - 1) * solution.num_levels
    doubts = _doubts(len(fitted), num, wanted, noise, drift, drift_error, judged)
    computed = replace(fitted, features=padded(fitted.features, graph_tokens))
    return model, Fit(
        domain=_range(computed.column("tokens")),
        regimes=_regimes(model, float((computed.column("tokens") / computed.column("num_forwards")).max())),
        residual=digits(np.sqrt(np.mean(residuals**2)), 4),
        standard_errors={name: digits(value, 3) for name, value in errors.items()},
        relative_uncertainty=None,
        num_points=len(fitted),
        held_out=judged,
        domains={name: _range(computed.column(name)) for name in DOMAINS}
        | {"keys": _range(fitted.column("sum_kv") / np.maximum(fitted.column("batch"), 1))},
        noise=None if noise is None else digits(noise, 3),
        drift=None if drift is None else digits(drift, 3),
        unidentified=tuple(missing),
        host_or_device=not timed and host["host_request"] > 0,
        valid=not doubts,
        doubts=doubts,
    )


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
    scale = np.linalg.norm(table, axis=0)
    values = nnls(table / scale, target)[0] / scale
    variance = float(((table @ values - target) ** 2).sum()) / max(1, len(target) - table.shape[1])
    errors = np.sqrt(variance * np.diag(np.linalg.inv((table / scale).T @ (table / scale)))) / scale
    return dict(zip(columns, values.tolist(), strict=True)), dict(zip(columns, errors.tolist(), strict=True))


def _noise(every: Points) -> float | None:
    known = every.spread[~np.isnan(every.spread)]
    return float(np.median(known)) if len(known) else None


def _drift(taken: Samples) -> tuple[float | None, float]:
    """The relative change of repeats over the sweep, and its standard error."""
    when = np.arange(len(taken)) / max(1, len(taken) - 1)
    num = np.bincount(taken.group)
    mean = np.bincount(taken.group, taken.latency) / np.maximum(num, 1)
    x = when - (np.bincount(taken.group, when) / np.maximum(num, 1))[taken.group]
    y = taken.latency / mean[taken.group] - 1.0
    degrees = int((num[num > 1] - 1).sum()) - 1
    # Repeats back to back show no drift.
    if degrees < 3 or (x**2).mean() < 1e-3:
        return None, np.inf
    slope = float((x * y).sum() / (x**2).sum())
    error = float(np.sqrt(((y - slope * x) ** 2).sum() / degrees / (x**2).sum()))
    # The slope of few, noisy repeats can exceed the whole latency.
    return max(-1.0, slope), error


def _doubts(
    num_points: int, num_coefficients: int, wanted: int, noise: float | None, drift: float | None, drift_error: float,
    judged: HeldOut | None,
) -> tuple[str, ...]:  # fmt: skip
    doubts = []
    if num_points < wanted:
        doubts.append(
            f"too few points: {num_points} step shapes for {num_coefficients} coefficients, expected at least {wanted}"
        )
    if noise is not None and noise > NOISE:
        doubts.append(f"noise: repeats of a step spread by {noise:.1%}, expected at most {NOISE:.0%}")
    if drift is not None and abs(drift) > max(DRIFT, 3 * drift_error):
        doubts.append(
            f"drift: repeats took {drift:+.1%} by the end (standard error {drift_error:.1%}), expected within "
            f"{DRIFT:.0%}: the device's clocks or its load changed"
        )
    if judged is None:
        doubts.append(f"too few points: none of {num_points} could be held out, expected at least 10 to measure")
        return tuple(doubts)
    for name, value, bound in (
        ("median", judged.median, HELD_OUT_MEDIAN),
        ("95th percentile", judged.p95, HELD_OUT_P95),
    ):
        if value > bound:
            doubts.append(f"held-out error: the {name} is {value:.1%}, expected at most {bound:.0%}")
    return tuple(doubts)


def _regimes(model: LatencyModel, most: float) -> tuple[str, ...]:
    """Each piece's regime by d log(seconds) / d log(tokens) at its middle."""
    x = [*(knot[0] for knot in model.knots), max(most, model.knots[-1][0])]
    regimes = []
    for start, end in pairwise(x):
        middle = np.sqrt(max(start, 1.0) * max(end, 1.0))
        rise = model.pieces(end) - model.pieces(start)
        growth = rise / max(end - start, 1e-9) * middle / max(model.pieces(middle), 1e-30)
        regimes.append("memory-bound" if growth < 1 / 3 else "transition" if growth < 2 / 3 else "compute-bound")
    return tuple(regimes)


def _range(values: Floats) -> tuple[float, float]:
    return float(values.min()), float(values.max())
