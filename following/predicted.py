"""The twin's prediction of a window: three replays of its arrivals, their residuals and their uncertainty."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..profiler.profile import Profile
from ..results.world import World
from ..sim.setting import Setting
from ..traces import Trace
from .alarms import SEEDS
from .replayed import Replay, pace_of, replayed
from .residuals import Residuals, figures_of, residuals_of
from .windows import Arrivals, Window, drawn_arrivals, trace_after

BAND_DRAWS = 6  # profiles drawn from the profile's uncertainty, once for each version
BEYOND = 1.1  # factor on the range of tokens that the profile was fitted to


@dataclass(frozen=True)
class Observed:
    """A window, its arrivals, and its run-in."""

    window: Window
    arrivals: Arrivals | None  # from a log; None: drawn for each seed
    before: "Observed | None" = None  # the window before it, if it follows on

    def trace(self, seed: int) -> tuple[Trace, float]:
        """The requests to replay, from the run-in on; and when in this trace the window begins (s)."""
        arrivals = self.arrivals_of(seed)
        before = None if self.before is None else self.before.arrivals_of(seed)
        first = (self.before or self).window
        backlog = round(first.samples[0].num_open)
        return trace_after(before, arrivals, first.duration if self.before else 0.0, backlog, "the last window")

    def arrivals_of(self, seed: int) -> Arrivals:
        """The window's arrivals, without the run-in."""
        return drawn_arrivals(self.window, seed) if self.arrivals is None else self.arrivals


@dataclass(frozen=True)
class Prediction:
    """The twin's replays of a window, with the residuals."""

    replays: tuple[Replay, ...]
    residuals: Residuals
    extrapolating: bool  # steps lie beyond the range that the profile was fitted to


def by_token(setting: Setting) -> bool:
    """Whether a forward makes one token."""
    return setting.policy.commits_by == "acceptance" and setting.policy.width == 1


def predict(world: World, setting: Setting, observed: Observed, seeds: int = SEEDS) -> Prediction:
    """Replay a window on a setting, and compare it with the measured window."""
    window = observed.window
    replays = []
    for seed in range(world.seed, world.seed + seeds):
        trace, begins = observed.trace(seed)
        replays.append(replayed(world, setting, trace, begins, window, seed))
    last = window.samples[-1]
    pace = pace_of([replay.steps for replay in replays], "forward_seconds" in last.counters)
    single = by_token(setting)
    # Take from the twin only the metrics that the server has.
    windows = [with_counters(replay.window, last.counters) for replay in replays]
    figures = [figures_of(twin, pace, single, last.histograms) for twin in windows]
    residuals = residuals_of(figures_of(window, pace, single, last.histograms), figures)
    return Prediction(tuple(replays), residuals, _beyond(replays, setting.profile))


def with_counters(window: Window, names: Collection[str]) -> Window:
    """The window with these counters only."""
    return Window(
        tuple(replace(s, counters={n: v for n, v in s.counters.items() if n in names}) for s in window.samples)
    )


def _beyond(replays: list[Replay], profile: Profile) -> bool:
    """Whether the median step has more or fewer tokens than any that the profile was fitted to."""
    tokens = np.concatenate([replay.steps["tokens"] for replay in replays])
    if not len(tokens) or profile.fit.num_points is None:  # without a fit no range is known
        return False
    low, high = profile.fit.domain
    middle = float(np.median(tokens))
    return not low / BEYOND <= middle <= high * BEYOND


def bands_of(world: World, observed: Observed, errors: Mapping[str, float]) -> dict[str, float]:
    """By quantity, the standard deviation over profiles drawn from the profile's uncertainty.

    errors: standard errors of the quantities that a refit has measured.
    """
    from ..planner.ensemble import drawn, known_causes, moved  # imported here: it loads SciPy

    causes = known_causes(world)
    setting = world.setting()
    values: dict[str, list[float]] = {}
    for index in range(1, BAND_DRAWS + 1):
        draw = moved(world, drawn(causes, index, world.seed))
        prediction = predict(draw, replace(setting, profile=draw.loaded_profile()), observed, 1)
        for name, (residual, _) in prediction.residuals.items():
            values.setdefault(name, []).append(residual)
    bands = {name: float(np.std(residuals, ddof=1)) for name, residuals in values.items() if len(residuals) > 1}
    bands = {name: band for name, band in (bands | dict(errors)).items() if math.isfinite(band)}
    return bands | {"step_time": max(doubt_of(setting.profile), bands.get("step_time", 0.0))}


def doubt_of(profile: Profile) -> float:
    """The possible error of a profile that failed its own checks, as a share of a step's time; 0 if it passed."""
    if not profile.fit.doubts or profile.fit.held_out is None:
        return 0.0
    return profile.fit.held_out.median
