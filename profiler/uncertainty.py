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
from ..engine.latency import LatencyModel, terms_of
from .calibrate import mean_yield, same_mean, shifted
from .canvas_law import mean_forwards, with_mean
from .known import unknown_host
from .profile import COSTS_OF, Profile

MEMORY, COMPUTE, LAUNCH = "memory time", "compute time", "launch floor"
HOST_STEP, HOST_REQUEST = "host time a step", "host time a request"
IMPLEMENTATION, WORKLOAD, FRONT_END = "another implementation", "yield of another workload", "front end"
MISFIT, YIELD, SPREAD = "shape of the latency model", "yield", "spread between requests"
FIT = "fitted "  # `fitted slope`: a coefficient with its standard error

# Bounds of an eager engine's unknown host terms: SGLang's host takes about 5.5 ms a forward of 72 rows (LLaDA2.1-mini
# on an H20, sglang #33322), as if all per step or all per row.
UNKNOWN_HOST = {HOST_STEP: ("host_step", 5.5e-3), HOST_REQUEST: ("host_request", 5.5e-3 / 72)}  # field, s
PUBLISHED_YIELD = 0.1  # assumed relative difference between readings of a published mean
# Two codes' s a layer and s a forward: launch floors of Sparse-dLLM's and Fast-dLLM's on an RTX 4090, and host time of
# a row under SGLang in the shipped profiles of DiffusionGemma on two H200s and of LLaDA2.1-mini on an H20.
FLOORS, ENGINES = ("layer", 0.8e-3, 1.4375e-3), ("forward", 1.6e-3, 6.55e-3)
# Standard deviations of the logarithm of the ratio of two workloads' published yields, of one model, block length and
# threshold: over 24 of SDAR-8B, LLaDA2.0-mini, LLaDA-8B and DiffusionGemma; over 9 of LLaDA2.1, which edits blocks.
YIELD_SPREAD, EDITING_SPREAD = 0.45, 1.07
# 6/5 of the largest of five times between client and engine under load: vLLM on two CPU cores, 4.8 to 44 ms.
MOST_FRONT_END = 0.053  # s, the end of a uniform range
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
    stated: dict[str, str] = {}
    assumed: dict[str, str] = {}
    fit = profile.fit
    if fit.relative_uncertainty is not None:
        stated[MEMORY] = stated[COMPUTE] = f"±{100 * fit.relative_uncertainty:g} %, as stated in the profile"
        if profile.latency.launch > 0:
            stated[LAUNCH] = stated[MEMORY]
    if fit.held_out is not None:
        stated[MISFIT] = f"±{100 * fit.held_out.median:.2g} %, the median error of held-out steps"
    for name, error in (fit.standard_errors or {}).items():
        if error > 0:
            stated[FIT + name] = f"±{error:.2g}, its standard error"
    for name, (field, longest) in UNKNOWN_HOST.items():
        if field in unknown_host(profile):
            assumed[name] = f"unknown: 0 to {1e3 * longest:.2g} ms"
    if not timed(profile) and any(getattr(profile.latency, name) > 0 for name in terms_of("host")):
        per, low, high = _codes(profile)
        width = f"±{100 * _apart(profile):.0f} % of launch and host terms"
        stated[IMPLEMENTATION] = f"{width}: two codes take {1e3 * low:.3g} and {1e3 * high:.3g} ms a {per}"
    if profile.frontend == 0:
        assumed[FRONT_END] = f"not measured: 0 to {1e3 * MOST_FRONT_END:.2g} ms, vLLM's under load"
    if model is not None and not _logged(profile, model) and _draws(model):
        stated[WORKLOAD] = f"±{100 * _between_workloads(profile, model):.0f} %: published yields of two workloads"
    errors = None if model is None else _errors(profile, model)
    if errors is not None:
        for name, error in zip((YIELD, SPREAD), errors, strict=True):
            stated[name] = f"±{error:.2g} of log-odds, its standard error"
    elif model is not None and _draws(model):  # otherwise the number of forwards is fixed
        unit = "log-odds"
        if isinstance(model, CanvasLaw):
            unit = "standard deviations of a canvas" if model.histogram else "the logarithm of a block's forwards"
        assumed[YIELD] = f"±{100 * PUBLISHED_YIELD:g} %, assumed of a published mean"
        assumed[SPREAD] = f"unknown: 0 to {2 * model.request_spread:.2g} of {unit}"
    return tuple(
        Cause(name, reason, reasons is assumed, _owner(profile, model, name))
        for reasons in (stated, assumed)
        for name, reason in reasons.items()
    )


def _owner(profile: Profile, model: Yielding | None, cause: str) -> str:
    """Whose the error is: two profiles of one card, code, model or published mean share it."""
    if cause in (MEMORY, COMPUTE):
        # Errors of dense products and of experts, and of precisions, are not one card's: those of its kernels.
        bits = round(8 * profile.memory.weight_bytes / profile.model.total_params)
        return f"{profile.device.name} {profile.model.experts is None} {bits}"
    if cause == WORKLOAD:
        return profile.model.name
    if cause in (YIELD, SPREAD) and model is not None:
        origin = profile.model.name if _errors(profile, model) is None else profile.name
        if isinstance(model, CanvasLaw):
            return f"{origin} {model.workload} {model.canvas_length} {model.engine}"
        return f"{origin} {model.workload} {model.extrapolated_from or model.block_length} {model.threshold}"
    return profile.name if cause == MISFIT or cause.startswith(FIT) else profile.implementation


def varied(
    profile: Profile, moved: Sequence[tuple[str, float]], model: Yielding | None, peers: Sequence[CommitModel] = ()
) -> Profile:
    """The profile with causes moved by their scores; model: as in `causes`.

    peers: the run's models at other thresholds, which move with `model`.
    """
    scores = dict(moved)
    names = {cause.name for cause in causes(profile, model)}
    for name in scores:
        if name not in names:
            raise ProfileError(f"{profile.name} is not uncertain of {name}; it is of {', '.join(sorted(names))}")
    fit = profile.fit
    width = fit.relative_uncertainty or 0.0
    misfit = (0.0 if fit.held_out is None else fit.held_out.median) * scores.get(MISFIT, 0.0)
    memory, compute = (float(np.exp(misfit + width * scores.get(name, 0.0))) for name in (MEMORY, COMPUTE))
    latency = _at_efficiencies(profile.latency, memory, compute)
    latency = latency.times(float(np.exp(width * scores.get(LAUNCH, 0.0))), ["launch"])
    for name, (field, longest) in UNKNOWN_HOST.items():
        if name in scores:
            unknown: Any = {field: longest * float(ndtr(scores[name]))}
            latency = replace(latency, **unknown)
    if IMPLEMENTATION in scores:
        latency = latency.times(float(np.exp(_apart(profile) * scores[IMPLEMENTATION])), terms_of("host"))
    for name, error in (fit.standard_errors or {}).items():
        if FIT + name in scores:
            term: Any = {name: max(0.0, getattr(latency, name) + error * scores[FIT + name])}
            latency = replace(latency, **term)
    profile = replace(profile, latency=latency)
    if FRONT_END in scores:
        profile = replace(profile, frontend=MOST_FRONT_END * float(ndtr(scores[FRONT_END])))
    if model is None or not {YIELD, WORKLOAD, SPREAD} & set(scores):
        return profile
    # In units of a published mean's width.
    of_workload = _between_workloads(profile, model) / PUBLISHED_YIELD * scores.get(WORKLOAD, 0.0)
    of_yield, spread = scores.get(YIELD, 0.0) + of_workload, scores.get(SPREAD)
    if isinstance(model, CanvasLaw):
        return replace(profile, canvas_laws=(_varied_law(model, of_yield, spread),))
    models = [_varied_commits(entry, of_yield, spread, _errors(profile, entry)) for entry in (model, *peers)]
    return replace(profile, commits=tuple(models))


def common_error(profiles: Sequence[Profile], model: Yielding | None) -> str:
    """Which unknowns cancel in a comparison of GPUs, and which do not; profiles: one a GPU, the best first."""
    unknowns = [{(cause.name, cause.owner) for cause in causes(profile, model)} for profile in profiles]
    shared = sorted(name for name, _ in set.intersection(*unknowns))
    hosts = {profile.device.name: profile.provenance.settings.get(COSTS_OF, profile.name) for profile in profiles}
    names, own = [*hosts], "device time"
    if min(len({profile.implementation for profile in profiles}), len({*hosts.values()})) > 1:
        own += f" and its engine's host time ({', '.join(f'{name} as in {costs}' for name, costs in hosts.items())})"
    widths = []
    for fit in (profile.fit for profile in profiles[:2]):
        widths.append(fit.held_out.median if fit.held_out else fit.relative_uncertainty or 0.0)
    return (
        f"{' and '.join(names)} share these unknowns, which largely cancel between them if one build runs on all: "
        f"{', '.join(shared)}. Each has its own {own}: device time alone leaves {names[0]} over {names[1]} uncertain "
        f"by ±{100 * math.hypot(*widths):.0f} %"
    )


def _at_efficiencies(latency: LatencyModel, memory: float, compute: float) -> LatencyModel:
    """The time of moved bytes and of products, each multiplied; the table's last knot has its tokens' products."""
    tokens, last = latency.knots[-1]
    heights = [memory * height for _, height in latency.knots]
    heights[-1] += (compute - memory) * min(last, latency.slope * tokens)
    rising = np.maximum.accumulate(heights).tolist()  # none is below the one before
    knots = tuple((x, height) for (x, _), height in zip(latency.knots, rising, strict=True))
    return replace(latency, knots=knots).times(memory, terms_of("bytes")).times(compute, terms_of("products"))


def _between_workloads(profile: Profile, model: Yielding) -> float:
    edits = isinstance(model, CanvasLaw) and profile.family != "canvas" and model.workload != "given"
    return EDITING_SPREAD if edits else YIELD_SPREAD


def _varied_law(law: CanvasLaw, yield_: float, spread: float | None) -> CanvasLaw:
    """Another yield, and another spread between requests at the same mean."""
    width = law.request_spread
    new = width if spread is None else 2 * width * float(ndtr(spread))
    return with_mean(replace(law, request_spread=new), mean_forwards(law) / float(np.exp(PUBLISHED_YIELD * yield_)))


def _codes(profile: Profile) -> tuple[str, float, float]:
    """A host that takes time a step plans for an engine, be its time a data sheet's; a script's is its launches."""
    return ENGINES if profile.latency.host_step > 0 else FLOORS


def _apart(profile: Profile) -> float:
    """The standard deviation of a log-normal from which two draws differ by the codes' ratio."""
    _, low, high = _codes(profile)
    return math.log(high / low) / math.sqrt(2)


def timed(profile: Profile) -> bool:
    """Whether launch and host terms were measured on, or calibrated to, the implementation."""
    return profile.origin != "roofline" or any(
        source.partition(" of ")[0] in terms_of("host") and (", calibrated: " in source or ", measured: " in source)
        for source in profile.provenance.sources
    )


def _logged(profile: Profile, model: Yielding) -> bool:
    """Whether the yield comes from a log of the same workload."""
    return profile.origin == "measured" or _errors(profile, model) is not None or "a step log of" in model.source


def _draws(model: Yielding) -> bool:
    """Whether the number of steps is random."""
    return not isinstance(model, CanvasLaw) or bool(model.request_spread or model.canvas_spread)


def _errors(profile: Profile, model: Yielding) -> tuple[float, float] | None:
    """Standard errors of a fitted model's log-odds and of its spread; None without a fit."""
    fit = None if isinstance(model, CanvasLaw) else profile.commit_fit(model)
    if fit is None:
        return None
    return fit.standard_errors.get("log_odds[0]", 0.0), fit.standard_errors.get("request_spread", 0.0)


@lru_cache(maxsize=512)
def _varied_commits(
    model: CommitModel, yield_: float, spread: float | None, errors: tuple[float, float] | None
) -> CommitModel:
    """Another yield, and another spread between requests at the same yield."""
    if spread is not None:
        width = model.request_spread
        new = 2 * width * float(ndtr(spread)) if errors is None else max(0.0, width + errors[1] * spread)
        model = same_mean(model, replace(model, request_spread=new))  # the spread alone would move the mean
    if errors is not None:
        return shifted(model, errors[0] * yield_)
    rise = (mean_yield(shifted(model, STEP)) - mean_yield(shifted(model, -STEP))) / (2 * STEP)  # per log-odds
    return shifted(model, PUBLISHED_YIELD * yield_ * mean_yield(model) / max(rise, 1e-6))
