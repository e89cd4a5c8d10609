"""A profile's unknowns by cause, and the profile with a cause moved.

A cause is moved by a score: 0 changes nothing, ±1 is one standard deviation. docs/ensemble.md has each width's source;
without one it is called assumed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import ndtr

from ..engine.commits import CanvasLaw, CommitModel
from ..engine.errors import ProfileError
from ..engine.latency import LatencyModel
from .canvas_law import mean_forwards, with_mean
from .known import unknown_host
from .profile import COSTS_OF, CommitFit, Profile
from .request_effects import mean_yield, same_mean, scaled, shifted

DEVICE, LAUNCH, HOST_STEP, HOST_REQUEST = "device time", "launch floor", "host time a step", "host time a request"
HOST_OR_DEVICE = "host or device"
IMPLEMENTATION, WORKLOAD, FRONT_END = "another implementation", "yield of another workload", "front end"
MISFIT, YIELD, SPREAD = "shape of the latency model", "yield", "spread between requests"
FIT = "fitted "  # `fitted slope`: a coefficient with its standard error

TABLES = ("knots", "graph_knots")  # of a latency model
# Bounds of an eager engine's unknown host terms: SGLang's host takes about 5.5 ms a forward of 72 rows (LLaDA2.1-mini
# on an H20, sglang #33322), as if all per step or all per row.
MOST_HOST = {HOST_STEP: 5.5e-3, HOST_REQUEST: 5.5e-3 / 72}  # s
PUBLISHED_YIELD = 0.1  # assumed relative difference between readings of a published mean
# Two codes' s a layer and s a forward: launch floors of Sparse-dLLM's and Fast-dLLM's on an RTX 4090, and host time of
# a row under SGLang in the shipped profiles of DiffusionGemma on two H200s and of LLaDA2.1-mini on an H20.
FLOORS, ENGINES = ("layer", 0.8e-3, 1.4375e-3), ("forward", 1.6e-3, 6.55e-3)
# SDAR-8B's published yields at one block length and threshold differ 2.5 times, by workload and by whether tokens
# behind an EOS count: taken as the range of ±1 standard deviation.
YIELD_RATIO = 2.5
YIELD_SPREAD = math.log(YIELD_RATIO) / 2
# The longest mean time between client and engine under load: vLLM at 8 req/s on two CPU cores.
MOST_FRONT_END = 0.044  # s
HOST_FIELDS = {HOST_STEP: "host_step", HOST_REQUEST: "host_request"}
HOST_TERMS = ("launch", "host_step", "host_request", "host_block", "sequence")
STEP = 0.1  # of log-odds, for a numerical derivative


@dataclass(frozen=True)
class Cause:
    name: str
    why: str  # the width and its source
    assumed: bool  # neither measured nor published
    owner: str = ""  # the card, code, model or profile that the error belongs to; empty: the traffic


Yielding = CommitModel | CanvasLaw  # sets how many steps a block takes


def causes(profile: Profile, model: Yielding | None) -> tuple[Cause, ...]:
    """The profile's unknowns; model: a run's commit model or law, or None."""
    found: list[Cause] = []
    fit, unknown = profile.fit, unknown_host(profile)
    if fit.relative_uncertainty is not None:
        width = f"±{100 * fit.relative_uncertainty:g} %, as stated in the profile"
        found.append(Cause(DEVICE, width, False))
        if profile.latency.launch > 0:
            found.append(Cause(LAUNCH, width, False))
    if fit.held_out is not None:
        found.append(Cause(MISFIT, f"±{100 * fit.held_out.median:.2g} %, the median error of held-out steps", False))
    for name, error in (fit.standard_errors or {}).items():
        if error > 0 and _value_of(profile.latency, name) is not None:
            found.append(Cause(FIT + name, f"±{error:.2g}, its standard error", False))
    for name, field in HOST_FIELDS.items():
        if field in unknown:
            found.append(Cause(name, f"unknown: 0 to {1e3 * MOST_HOST[name]:.2g} ms", True))
    if fit.host_or_device:
        time = f"{1e3 * profile.latency.host_request:.2g} ms"
        found.append(Cause(HOST_OR_DEVICE, f"unknown: 0 to all of host_request ({time}) is the device's", True))
    if not timed(profile) and any(getattr(profile.latency, name) > 0 for name in HOST_TERMS):
        per, low, high = _codes(profile)
        width = f"±{100 * _apart(profile):.0f} % of launch and host terms: two codes take {1e3 * low:.3g} and "
        width += f"{1e3 * high:.3g} ms a {per}"
        found.append(Cause(IMPLEMENTATION, width, False))
    if profile.frontend == 0:
        width = f"not measured: 0 to {1e3 * MOST_FRONT_END:.2g} ms, vLLM's under load"
        found.append(Cause(FRONT_END, width, True))
    if model is not None and not _logged(profile, model) and _draws(model):
        width = f"±{100 * YIELD_SPREAD:.2g} %: published yields of one model differ by {YIELD_RATIO:g} times"
        found.append(Cause(WORKLOAD, width, False))
    if isinstance(model, CanvasLaw):
        if _draws(model):  # otherwise the number of forwards is fixed
            found.append(Cause(YIELD, f"±{100 * PUBLISHED_YIELD:g} %, assumed: a law states no error", True))
            of = "standard deviations of a canvas" if model.histogram else "of the logarithm of a block's forwards"
            found.append(Cause(SPREAD, f"unknown: 0 to {2 * model.request_spread:.2g} {of}", True))
    elif model is not None:
        of_fit = _fit_of(profile, model)
        if of_fit is None:
            found.append(Cause(YIELD, f"±{100 * PUBLISHED_YIELD:g} %, assumed of a published mean", True))
            found.append(Cause(SPREAD, f"unknown: 0 to {2 * model.request_spread:.2g} of log-odds", True))
        else:
            errors = of_fit.standard_errors
            found.append(Cause(YIELD, f"±{errors.get('log_odds[0]', 0.0):.2g} of log-odds, its standard error", False))
            error = errors.get("request_spread", 0.0)
            found.append(Cause(SPREAD, f"±{error:.2g} of log-odds, its standard error", False))
    return tuple(replace(cause, owner=_owner(profile, model, cause.name)) for cause in found)


def _owner(profile: Profile, model: Yielding | None, cause: str) -> str:
    """Whose the error is: two profiles of one card, code, model or published mean share it."""
    if cause == DEVICE:
        return profile.device.name
    if cause == WORKLOAD:
        return profile.model.name
    if cause in (YIELD, SPREAD) and model is not None:
        whose = profile.model.name if _fit_of(profile, model) is None else profile.name
        if isinstance(model, CanvasLaw):
            return f"{whose} {model.workload} {model.canvas_length} {model.engine}"
        return f"{whose} {model.workload} {model.extrapolated_from or model.block_length} {model.threshold}"
    return profile.name if cause == MISFIT or cause.startswith(FIT) else profile.implementation


def varied(
    profile: Profile, moved: Sequence[tuple[str, float]], model: Yielding | None, others: Sequence[CommitModel] = ()
) -> Profile:
    """The profile with causes moved by their scores; model: as in `causes`.

    others: the run's models at other thresholds, which move with `model`.
    """
    scores = dict(moved)
    known = {cause.name for cause in causes(profile, model)}
    for name in scores:
        if name not in known:
            raise ProfileError(f"{profile.name} is not uncertain of {name}; it is of {', '.join(sorted(known))}")
    latency, fit = profile.latency, profile.fit
    width = fit.relative_uncertainty or 0.0
    factor = float(np.exp(width * scores.get(DEVICE, 0.0)))
    if fit.held_out is not None:
        factor *= float(np.exp(fit.held_out.median * scores.get(MISFIT, 0.0)))
    # Not the card's time, with which they would scale. A row's (`sequence`) is in part the decoder's loop over rows.
    apart = ("host_step", "host_request", "host_block", "sequence", "cache_overhead")
    more: dict[str, Any] = {name: getattr(latency, name) for name in apart}
    more["launch"] = latency.launch * float(np.exp(width * scores.get(LAUNCH, 0.0)))
    for name, field in HOST_FIELDS.items():
        if name in scores:
            more[field] = MOST_HOST[name] * float(ndtr(scores[name]))
    if IMPLEMENTATION in scores:
        floor = float(np.exp(_apart(profile) * scores[IMPLEMENTATION]))
        more |= {name: floor * more.get(name, getattr(latency, name)) for name in HOST_TERMS}
    latency = replace(latency.scaled(factor), **more)
    if HOST_OR_DEVICE in scores:
        hidden = latency.host_request * float(ndtr(scores[HOST_OR_DEVICE]))
        latency = replace(latency, host_request=latency.host_request - hidden, sequence=latency.sequence + hidden)
    for name, error in (fit.standard_errors or {}).items():
        if FIT + name in scores:
            latency = _moved(latency, name, error * scores[FIT + name])
    found = replace(profile, latency=latency)
    if FRONT_END in scores:
        found = replace(found, frontend=MOST_FRONT_END * float(ndtr(scores[FRONT_END])))
    if model is None or not {YIELD, WORKLOAD, SPREAD} & set(scores):
        return found
    # In units of a published mean's width.
    of_yield = scores.get(YIELD, 0.0) + YIELD_SPREAD / PUBLISHED_YIELD * scores.get(WORKLOAD, 0.0)
    if isinstance(model, CanvasLaw):
        return replace(found, canvas_laws=(_varied_law(model, of_yield, scores.get(SPREAD)),))
    moved_models = []
    for own in (model, *others):
        of_fit = _fit_of(profile, own)
        stated = {} if of_fit is None else of_fit.standard_errors
        errors = None if of_fit is None else (stated.get("log_odds[0]", 0.0), stated.get("request_spread", 0.0))
        moved_models.append(_varied_commits(own, of_yield, scores.get(SPREAD), errors))
    return replace(found, commits=tuple(moved_models))


def common_error(profiles: Sequence[Profile], model: Yielding | None) -> str:
    """Say which unknowns cancel in a comparison of GPUs, and which do not; profiles: one a GPU, the best first."""
    each = [{(cause.name, cause.owner) for cause in causes(profile, model)} for profile in profiles]
    shared, names, apart = dict(set.intersection(*each)), [profile.device.name for profile in profiles], ""
    if len({profile.implementation for profile in profiles}) > 1:
        costs = [str(profile.provenance.settings.get(COSTS_OF, profile.name)) for profile in profiles]
        apart = f" and its engine's host time ({', '.join(map(' as in '.join, zip(names, costs, strict=True)))})"
    fits = [profile.fit for profile in profiles[:2]]
    width = math.hypot(*(fit.held_out.median if fit.held_out else fit.relative_uncertainty or 0.0 for fit in fits))
    return (
        f"{' and '.join(names)} share these unknowns, which largely cancel between them: {', '.join(sorted(shared))}. "
        f"Each has its own device time{apart}: device time alone leaves {names[0]} over {names[1]} uncertain by "
        f"±{100 * width:.0f} %"
    )


def _varied_law(law: CanvasLaw, yield_: float, spread: float | None) -> CanvasLaw:
    """Another yield, and another spread between requests at the same mean."""
    width = law.request_spread
    new = width if spread is None else 2 * width * float(ndtr(spread))
    return with_mean(replace(law, request_spread=new), mean_forwards(law) / float(np.exp(PUBLISHED_YIELD * yield_)))


def _codes(profile: Profile) -> tuple[str, float, float]:
    return ENGINES if COSTS_OF in profile.provenance.settings else FLOORS


def _apart(profile: Profile) -> float:
    """The standard deviation of a log-normal from which two draws differ by the codes' ratio."""
    _, low, high = _codes(profile)
    return math.log(high / low) / math.sqrt(2)


def timed(profile: Profile) -> bool:
    """Whether launch and host terms were measured on, or calibrated to, the implementation."""
    terms = [source for source in profile.provenance.sources if any(source.startswith(f"{t} of ") for t in HOST_TERMS)]
    return profile.origin != "roofline" or any(", calibrated: " in term or ", measured: " in term for term in terms)


def _logged(profile: Profile, model: Yielding) -> bool:
    """Whether the yield comes from a log of the same workload."""
    return profile.origin == "measured" or _fit_of(profile, model) is not None or "a step log of" in model.source


def _draws(model: Yielding) -> bool:
    """Whether the number of steps is random."""
    return not isinstance(model, CanvasLaw) or bool(model.request_spread or model.canvas_spread)


def _fit_of(profile: Profile, model: Yielding) -> CommitFit | None:
    return None if isinstance(model, CanvasLaw) else profile.commit_fit(model)


@lru_cache(maxsize=512)
def _varied_commits(
    model: CommitModel, yield_: float, spread: float | None, errors: tuple[float, float] | None
) -> CommitModel:
    """Another yield, and another spread between requests at the same yield."""
    if spread is not None:
        width = model.request_spread
        new = 2 * width * float(ndtr(spread)) if errors is None else max(0.0, width + errors[1] * spread)
        model = same_mean(model, scaled(model, new))  # the spread alone would move the mean
    if errors is not None:
        return shifted(model, errors[0] * yield_)
    return shifted(model, PUBLISHED_YIELD * yield_ * mean_yield(model) / max(_rise(model), 1e-6))


def _rise(model: CommitModel) -> float:
    """The mean yield's change per unit of log-odds."""
    return (mean_yield(shifted(model, STEP)) - mean_yield(shifted(model, -STEP))) / (2 * STEP)


def _value_of(latency: LatencyModel, name: str) -> float | None:
    """A coefficient by its standard error's name; None for a bend's position, whose height is a cause too."""
    if (found := _knot(name)) is not None:
        table, knot = found
        knots: tuple[tuple[float, float], ...] = getattr(latency, table)
        return knots[knot][1] if knot < len(knots) else None
    value = getattr(latency, name, None)
    return value if isinstance(value, float) else None


def _knot(name: str) -> tuple[str, int] | None:
    """Table and index of a knot's height, or None."""
    table, _, place = name.partition("[")
    return (table, int(place.removesuffix("][1]"))) if table in TABLES and place.endswith("][1]") else None


def _moved(latency: LatencyModel, name: str, by: float) -> LatencyModel:
    """A coefficient moved, at least 0, with no knot below the one before."""
    found = _knot(name)
    if found is None:
        return replace(latency, **{name: max(0.0, getattr(latency, name) + by)})
    table, knot = found
    knots = getattr(latency, table)
    heights = [y for _, y in knots]
    heights[knot] = max(0.0, heights[knot] + by)
    rising = np.maximum.accumulate(heights)
    moved: Any = tuple((x, float(y)) for (x, _), y in zip(knots, rising, strict=True))
    return replace(latency, **{table: moved})
