"""The twin's prediction of a window: three replays of its arrivals, and their residuals."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from ..profiler.profile import Profile
from ..results.world import World
from ..sim.setting import Setting
from ..traces import Trace
from .alarms import SEEDS
from .replayed import Replay, pace_of, replayed
from .residuals import Residuals, figures_of, residuals_of
from .windows import Window, drawn_arrivals, trace_after

BEYOND = 1.1  # factor on the range of tokens that the profile was fitted to


@dataclass(frozen=True)
class Observed:
    """A window, and its run-in: the end of the window before it, if it follows on."""

    window: Window
    run_in: Window | None = None

    def trace(self, seed: int) -> tuple[Trace, float]:
        """The requests to replay, from the run-in on; and when in this trace the window begins (s)."""
        arrivals = drawn_arrivals(self.window, seed)
        before, duration = None, 0.0
        if self.run_in is not None:
            before, duration = drawn_arrivals(self.run_in, seed), self.run_in.duration
        backlog = round((self.run_in or self.window).samples[0].num_open)
        return trace_after(before, arrivals, duration, backlog)


@dataclass(frozen=True)
class Prediction:
    """The twin's replays of a window, with the residuals."""

    replays: tuple[Replay, ...]
    residuals: Residuals
    extrapolating: bool  # steps lie beyond the range that the profile was fitted to


def by_token(setting: Setting) -> bool:
    """Whether a forward makes one token."""
    return setting.policy.commits_by == "acceptance" and setting.policy.width == 1


def predict(world: World, setting: Setting, observed: Observed) -> Prediction:
    """Replay a window on a setting, and compare it with the measured window."""
    window = observed.window
    replays = []
    for seed in range(world.seed, world.seed + SEEDS):
        trace, begin = observed.trace(seed)
        replays.append(replayed(world, setting, trace, begin, window, seed))
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
    samples = []
    for sample in window.samples:
        counters = {name: count for name, count in sample.counters.items() if name in names}
        samples.append(replace(sample, counters=counters))
    return Window(tuple(samples))


def _beyond(replays: list[Replay], profile: Profile) -> bool:
    """Whether the median step has more or fewer tokens than any that the profile was fitted to."""
    tokens = np.concatenate([replay.steps["tokens"] for replay in replays])
    if not len(tokens) or profile.fit.num_points is None:  # without a fit no range is known
        return False
    low, high = profile.fit.domain
    return not low / BEYOND <= float(np.median(tokens)) <= high * BEYOND


def doubt_of(profile: Profile) -> float:
    """The possible error of a profile that failed its own checks, as a share of a step's time; 0 if it passed."""
    if not profile.fit.doubts or profile.fit.held_out is None:
        return 0.0
    return profile.fit.held_out.median
