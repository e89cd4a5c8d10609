"""Alarms: a two-sided CUSUM for each quantity, and which of four causes is open.

In each window a chart adds the distance of its residual beyond an allowance k; it alarms above a threshold h. Both are
in standard deviations of the residual. k is half of the smallest shift that matters, at least K_LEAST. h follows from
the average run length (ARL), the number of windows between false alarms, by Siegmund's approximation (Sequential
Analysis, 1985, II.10.16):

    ARL = (exp(2 k b) - 2 k b - 1) / (2 k^2),  b = h + 1.166

All charts together may give one false alarm a month, which has WINDOWS_A_MONTH windows. So the ARL of a one-sided chart
is WINDOWS_A_MONTH times the number of one-sided charts.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import brentq

from .residuals import CAUSE_OF, CAUSES, PRICES, RULE, TRAFFIC, YIELD, Residuals

WINDOWS_A_MONTH = 30 * 24 * 12  # of five minutes
# The smallest shift of the logarithm that matters, by cause.
MATTERS = {TRAFFIC: math.log(1.2), PRICES: math.log(1.05), YIELD: math.log(1.05), RULE: math.log(1.2)}
K_LEAST = 0.5
OVERSHOOT = 1.166  # mean overshoot of a normal random walk beyond its thresholds, both ends together
WINDOW_SHARE = 0.6  # the most that a window adds, as a share of h: no single window raises an alarm
LEAST_H = 3.0
LEARNT_ERRORS = 2.0  # standard errors by which learnt traffic may be wrong
SEEDS = 3  # replays of a prediction
MEMORY = 288  # windows (a day): their differences give a residual's noise
FEW = 12  # fewer windows: only the seeds' spread counts
FLOOR = 0.005  # the least standard deviation of a logarithm
RECENT = 2  # windows; the mean of their residuals is an alarm's shift
SMOOTH = 0.2  # weight of a new window in the moving average
FAR = 3.0  # standard deviations beyond which prices or yield explain a queue


def threshold(k: float, windows: float) -> float:
    """The h that gives a one-sided CUSUM with allowance k a false alarm every `windows` windows on average."""

    def excess(h: float) -> float:
        x = min(700.0, 2 * k * (h + OVERSHOOT))
        return (math.exp(x) - x - 1) / (2 * k * k) - windows

    return LEAST_H if excess(LEAST_H) >= 0 else float(brentq(excess, LEAST_H, 100.0))


def learnt_band(num_requests: int) -> float:
    """The band of traffic if the usual traffic is the mean over `num_requests` requests.

    Its error shifts every window by the same amount, so it is added to the shift that matters, on both sides.
    """
    return MATTERS[TRAFFIC] + 2 * LEARNT_ERRORS / math.sqrt(max(1, num_requests))


@dataclass
class Chart:
    """The CUSUM of one quantity."""

    name: str
    num_charts: int
    up: float = 0.0
    down: float = 0.0
    mean: float = 0.0  # exponentially weighted, of the residuals
    num_windows: int = 0
    residuals: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    spreads: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))

    @property
    def cause(self) -> str:
        return CAUSE_OF[self.name]

    def deviation(self) -> float:
        """The residual's standard deviation: between the twin's seeds, or between windows if that is larger."""
        deviation = math.sqrt(float(np.mean(np.square(self.spreads or [0.0]))) * (1 + 1 / SEEDS))
        if len(self.residuals) >= FEW:
            windows = 1.4826 * float(np.median(np.abs(np.diff(self.residuals)))) / math.sqrt(2)
            deviation = max(deviation, windows)
        # After few windows the spread is itself uncertain: use its upper end.
        return max(FLOOR, deviation * math.sqrt(1 + 2 / math.sqrt(max(1, len(self.spreads)))))

    def limits(self, band: float) -> tuple[float, float]:
        """k and h, in standard deviations; band: the shift that is expected."""
        k = max(K_LEAST, max(MATTERS[self.cause], band) / 2 / self.deviation())
        return k, threshold(k, WINDOWS_A_MONTH * 2 * self.num_charts)

    def add(self, residual: float, spread: float, band: float, frozen: bool) -> bool:
        """Add a window's residual; return whether the chart alarms. frozen: record the residual, keep the sums."""
        self.spreads.append(spread)
        self.residuals.append(residual)
        self.num_windows += 1
        self.mean += max(SMOOTH, self.num_windows == 1) * (residual - self.mean)
        if not frozen:
            k, h = self.limits(band)
            z = residual / self.deviation()
            step = WINDOW_SHARE * h
            # At most 2 h, so that an alarm ends soon after its shift does.
            self.up = min(2 * h, max(0.0, self.up + min(step, z - k)))
            self.down = min(2 * h, max(0.0, self.down + min(step, -z - k)))
        return self.alarms(band)

    def alarms(self, band: float) -> bool:
        """Whether a sum is above its threshold."""
        return max(self.up, self.down) > self.limits(band)[1]

    def off(self, residual: float) -> bool:
        """Whether a new residual or the moving average is further from 0 than is usual."""
        deviation = self.deviation()
        return abs(residual) > FAR * deviation or abs(self.mean) > FAR * deviation * math.sqrt(SMOOTH / (2 - SMOOTH))

    def state(self) -> list[float]:
        """The values that `restore` needs in addition to the residuals."""
        return [self.up, self.down, self.mean, self.num_windows]

    def restore(self, state: Sequence[float], residuals: Sequence[tuple[float, float]]) -> None:
        """Restore a stored state. residuals: pairs of residual and spread, the oldest first."""
        self.up, self.down, self.mean = state[:3]
        self.num_windows = int(state[3])
        for residual, spread in residuals:
            self.residuals.append(residual)
            self.spreads.append(spread)

    def reset(self) -> None:
        """Start over, after the twin or the server has changed."""
        self.up = self.down = self.mean = 0.0
        self.num_windows = 0


@dataclass(frozen=True)
class Alarm:
    """An open cause."""

    cause: str
    since: float  # s since 1970
    quantity: str  # its chart raised the alarm
    shift: float  # its mean residual when it did
    words: str = ""  # such as `prices: step_time is 12 % above the twin's`

    @classmethod
    def of(cls, cause: str, since: float, quantity: str, shift: float) -> "Alarm":
        ratio = math.expm1(shift)
        side = "above" if ratio > 0 else "below"
        expected = "the usual" if cause == TRAFFIC else "the twin's"
        words = f"{cause}: {quantity} is {abs(ratio):.0%} {side} {expected}"
        return cls(cause=cause, since=since, quantity=quantity, shift=shift, words=words)


class Alarms:
    """The charts of all quantities, and the open causes."""

    def __init__(self) -> None:
        self.charts = {name: Chart(name, len(CAUSE_OF)) for name in CAUSE_OF}
        self.open: dict[str, Alarm] = {}

    def explained(self, residuals: Residuals) -> bool:
        """Whether prices or yield are off in this window, which explains a queue."""
        for name in ("step_time", "steps_per_token"):
            chart = self.charts[name]
            if chart.cause in self.open or (name in residuals and chart.off(residuals[name][0])):
                return True
        return False

    def add(
        self, now: float, residuals: Residuals, bands: Mapping[str, float], waiting: Collection[str] = ()
    ) -> list[Alarm]:
        """Add a window's residuals and return the alarms that it raises.

        waiting: the causes whose charts keep their sums, since the twin cannot predict their quantities in this window.
        """
        raised = []
        for name, (residual, spread) in residuals.items():
            chart = self.charts[name]
            frozen = chart.cause in waiting
            alarms = chart.add(residual, spread, bands.get(name, 0.0), frozen)
            if alarms and not frozen and chart.cause not in self.open:
                shift = float(np.mean(list(chart.residuals)[-RECENT:]))
                self.open[chart.cause] = Alarm.of(chart.cause, now, name, shift)
                raised.append(self.open[chart.cause])
        return raised

    def close(self, causes: Collection[str] = CAUSES) -> None:
        """Start over for these causes."""
        for chart in self.charts.values():
            if chart.cause in causes:
                chart.reset()
        for cause in causes:
            self.open.pop(cause, None)

    def settle(self, bands: Mapping[str, float]) -> list[str]:
        """Close each cause if all its charts are back within their allowance; return the closed causes' names."""
        unsettled = {
            chart.cause
            for chart in self.charts.values()
            if chart.alarms(bands.get(chart.name, 0.0)) or abs(chart.mean) > MATTERS[chart.cause] / 2
        }
        settled = [cause for cause in self.open if cause not in unsettled]
        self.close(settled)
        return settled
