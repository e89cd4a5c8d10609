"""The twin's prediction of a window: three replays of its arrivals, their residuals and their uncertainty."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..profiler.profile import Profile
from ..results.scenario import Scenario
from ..sim.setting import Setting
from ..traces import Trace
from .alarms import SEEDS
from .replayed import Replay, pace_of, replayed
from .residuals import Residuals, figures_of, residuals_of
from .sources.growing import StepsSeen
from .windows import Arrivals, Window, drawn_arrivals, trace_of

BAND_DRAWS = 6  # profiles drawn from the profile's uncertainty, once for each version
GRADES = ("rates", "rates and requests", "steps")  # what is read
BEYOND = 1.1  # factor on the range of tokens that the profile was fitted to


@dataclass(frozen=True)
class Seen:
    """A window, its arrivals, and its run-in."""

    window: Window
    arrivals: Arrivals | None  # from a log; None: drawn for each seed
    steps: StepsSeen | None = None  # from a step log
    before: "Seen | None" = None  # the window before it, if it follows on

    @property
    def grade(self) -> str:
        """What was read of the window."""
        return GRADES[2 if self.steps is not None else int(self.arrivals is not None)]

    def trace(self, seed: int, shape: Trace | None) -> tuple[Trace, float]:
        """The requests to replay, from the run-in on; and when in this trace the window begins (s)."""
        own = self.arrivals_of(seed, shape)
        before = None if self.before is None else self.before.arrivals_of(seed, shape)
        first = (self.before or self).window
        backlog = round(first.samples[0].num_open)
        return trace_of(before, own, first.duration if self.before else 0.0, backlog, "the last window")

    def arrivals_of(self, seed: int, shape: Trace | None) -> Arrivals:
        """The window's arrivals, without the run-in."""
        return drawn_arrivals(self.window, seed, shape) if self.arrivals is None else self.arrivals


@dataclass(frozen=True)
class Prediction:
    """The twin's replays of a window, with the residuals."""

    replays: tuple[Replay, ...]
    residuals: Residuals
    extrapolating: bool  # steps lie beyond the range that the profile was fitted to


def by_token(setting: Setting) -> bool:
    """Whether a forward makes one token."""
    return setting.policy.commits_by == "acceptance" and setting.policy.width == 1


def predict(
    scenario: Scenario, setting: Setting, seen: Seen, shape: Trace | None = None, seeds: int = SEEDS
) -> Prediction:
    """Replay a window on a setting, and compare it with the measured window."""
    window = seen.window
    replays = []
    for seed in range(seeds):
        trace, begins = seen.trace(scenario.seed + seed, shape)
        replays.append(replayed(scenario, setting, trace, begins, window, scenario.seed + seed))
    per_forward = "forward_seconds" in window.samples[-1].counters
    pace = pace_of([replay.steps for replay in replays], per_forward)
    ends = window.samples[-1].histograms
    single = by_token(setting)
    known = window.samples[-1].counters
    # Take from the twin only the metrics that the server has.
    own = [replace_counters(replay.window, known) for replay in replays]
    figures = [figures_of(one, pace, single, ends) for one in own]
    residuals = residuals_of(figures_of(window, pace, single, ends), figures)
    if seen.steps is not None:
        residuals |= _of_steps(seen.steps, setting, replays)
    return Prediction(tuple(replays), residuals, _beyond(replays, setting.profile))


def _of_steps(seen: StepsSeen, setting: Setting, replays: list[Replay]) -> dict[str, tuple[float, float]]:
    """The residuals of logged steps: their time at their own features, and steps a token."""
    from ..profiler.fit import predict as seconds_of  # imported here, as elsewhere: it loads SciPy

    steps = seen.steps
    predicted = float(seconds_of(setting.profile.latency, steps.features, steps.blocks).sum())
    found = {"step_time": (math.log(float(steps.latency.sum()) / predicted), 0.0)}
    own = [(r.window.added("steps"), r.window.added("generation_tokens")) for r in replays]
    logs = np.array([math.log(forwards / tokens) for forwards, tokens in own if forwards and tokens])
    if seen.forwards and seen.tokens and len(logs) > 1:
        mine = math.log(seen.forwards / seen.tokens)
        found["steps_per_token"] = (mine - float(logs.mean()), float(logs.std(ddof=1)))
    return found


def replace_counters(window: Window, known: Mapping[str, float]) -> Window:
    """The window with only the counters that a server has."""
    return Window(
        tuple(replace(s, counters={n: v for n, v in s.counters.items() if n in known}) for s in window.samples)
    )


def _beyond(replays: list[Replay], profile: Profile) -> bool:
    """Whether the median step has more or fewer tokens than any that the profile was fitted to."""
    tokens = np.concatenate([replay.steps.tokens for replay in replays])
    if not len(tokens) or profile.fit.num_points is None:  # without a fit no range is known
        return False
    low, high = profile.fit.domain
    middle = float(np.median(tokens))
    return not low / BEYOND <= middle <= high * BEYOND


def bands_of(scenario: Scenario, seen: Seen, shape: Trace | None, known: Mapping[str, float]) -> dict[str, float]:
    """By quantity, the standard deviation over profiles drawn from the profile's uncertainty.

    known: quantities that a refit has measured, with their standard errors.
    """
    from ..planner.ensemble import drawn, known_causes, moved  # imported here: it loads SciPy

    causes = known_causes(scenario)
    floor = doubt_of(scenario.setting().profile)
    values: dict[str, list[float]] = {}
    setting = scenario.setting()
    for index in range(1, BAND_DRAWS + 1):
        own = moved(scenario, drawn(causes, index, scenario.seed))
        found = predict(own, replace(setting, profile=own.loaded_profile()), seen, shape, 1)
        for name, (residual, _) in found.residuals.items():
            values.setdefault(name, []).append(residual)
    bands = {name: float(np.std(of, ddof=1)) for name, of in values.items() if len(of) > 1}
    sure = {name: band for name, band in (bands | dict(known)).items() if math.isfinite(band)}
    return sure | {"step_time": max(floor, sure.get("step_time", 0.0))}


def doubt_of(profile: Profile) -> float:
    """The possible error of a profile that failed its own checks, as a share of a step's time; 0 if it passed."""
    fit = profile.fit
    if not fit.doubts:
        return 0.0
    of = (fit.noise, fit.drift, None if fit.held_out is None else fit.held_out.median)
    return max(abs(x) for x in (*of, 0.0) if x is not None)
