"""The rate at which a replication's SLOs stop being met, found with few replays."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..engine.errors import DsimError
from ..files.read import quoted
from ..report.table import within
from .replicate import Criterion, Reading

LOWEST = 20.0  # log rate below the first guess at which to give up
ERROR = 0.25  # of a straight line to the bound, in precisions
BENT = 3.0  # precisions between two readings that add 100 % to their slope's doubt
LEAST_DOUBT, MOST_DOUBT = 0.1, 0.5  # relative; more doubtful slopes are not passed on
NEAR = 0.15  # log rate around a capacity within which severities rise along a line
FEWEST_FREE = 2  # degrees of freedom of a common slope


@dataclass(frozen=True)
class Slope:
    """Rise of a criterion's severity with the log rate, where the severity is near 0."""

    value: float
    doubt: float  # relative
    criterion: int  # index


@dataclass(frozen=True)
class Crossing:
    """A replication's capacity."""

    rate: float  # req/s
    binding: int  # criterion broken just above; -1: the queue grows
    rejected: float  # share
    slope: float | None = None  # of the binding criterion's severity
    near: tuple[tuple[float, float], ...] = ()  # log rates near the capacity, and severities


@dataclass(frozen=True)
class _Try:
    log_rate: float
    reading: Reading

    @property
    def criterion(self) -> int:
        """The criterion nearest to its bound, or furthest beyond."""
        return int(np.argmax(self.reading.severities))

    @property
    def severity(self) -> float:
        """Of that criterion; infinite if the queue grows."""
        return max(self.reading.severities) if self.reading.stable else math.inf

    def root(self, slope: Slope) -> float:
        """Log rate at which a line of this slope meets the bound; NaN if unknown."""
        fits = slope.criterion == self.criterion and math.isfinite(self.severity)
        return self.log_rate - self.severity / slope.value if fits else math.nan


def find(
    read: Callable[[float], Reading], criteria: Sequence[Criterion], centre: float, width: float, sharp: float,
    slope: Slope | None = None,
) -> Crossing:  # fmt: skip
    """The rate at which readings stop holding, within a relative `sharp`.

    From `centre` the search steps towards the bound along a line: `slope` of other replications, or one through two
    readings. Without a line it steps by `width` in log rate, doubled each time. It ends when the nearest reading's line
    errs by at most ERROR of `sharp`, or readings on both sides are within `sharp`. Only `slope` leads above the last
    reading, as a queue may begin to grow.
    """
    tries: list[_Try] = []
    below = above = before = None
    log_rate, gap = math.log(centre), math.inf
    while True:
        now = _Try(log_rate, read(math.exp(log_rate)))
        tries.append(now)
        if now.reading.holds:
            below = now
        else:
            above = now
        nearest = min((end for end in (below, above) if end is not None), key=lambda end: abs(end.severity))
        line = _line(below, above, sharp) if below and above else _line(before, now, sharp)
        for rise in (slope, line if above else None):
            if rise is None:
                continue
            root = nearest.root(rise)
            inside = (not below or below.log_rate <= root) and (not above or root <= above.log_rate)
            if inside and abs(root - nearest.log_rate) * rise.doubt <= ERROR * sharp:
                return _crossing(root, nearest.criterion, tries, line)
        if below and above:
            root, last, gap = _between(below, above), gap, above.log_rate - below.log_rate
            if gap <= sharp:
                return _crossing(root, above.reading.worst, tries, line)
            edge = max(0.1 * gap, 0.4 * sharp)
            middle = root if gap <= last / 2 else (below.log_rate + above.log_rate) / 2
            log_rate = min(max(middle, below.log_rate + edge), above.log_rate - edge)
        else:
            if above and math.log(centre) - above.log_rate > LOWEST:
                raise never(criteria, above.reading)
            step = width
            if not math.isnan(distance := _distance(now, line or slope)):
                step = min(max(distance + ERROR * sharp, sharp / 2), 2 * width)  # slightly beyond, for a bracket
            log_rate = max(log_rate + (step if below else -step), math.log(centre) - 1.01 * LOWEST)
            width *= 2
        before = now


def never(criteria: Sequence[Criterion], idle: Reading) -> DsimError:
    """Error for a criterion that an idle server violates."""
    worst = max(0, idle.worst)
    criterion, value = criteria[worst], idle.values[worst]
    observed = f"{100 * value:.4g}% of arrivals meet it"
    if criterion.share is None:
        milliseconds = within(1e3 * value, 1e3 * criterion.bound, 1)
        observed = f"{criterion.slos[0].stat} of {criterion.slos[0].metric} is {milliseconds} ms"
    return DsimError(
        f"SLO {quoted(criterion.text)} holds at no rate: {observed} at {idle.rate:.2g} req/s, where the server is "
        "nearly idle"
    )


def _crossing(log_rate: float, binding: int, tries: Sequence[_Try], line: Slope | None) -> Crossing:
    near = []
    for attempt in tries:
        place = math.log(attempt.reading.rate)
        if attempt.criterion == binding and abs(place - log_rate) <= NEAR and math.isfinite(attempt.severity):
            near.append((place, attempt.severity))
    return Crossing(
        rate=math.exp(log_rate),
        binding=binding,
        rejected=max(attempt.reading.rejected for attempt in tries),
        slope=line.value if line is not None and line.criterion == binding else None,
        near=tuple(near),
    )


def common_slope(crossings: Sequence[Crossing]) -> Slope | None:
    """Slope of parallel lines through replications' readings, by least squares; None if doubtful or SLOs differ."""
    binding = crossings[0].binding
    if binding < 0 or any(crossing.binding != binding for crossing in crossings):
        return None
    points = [np.array(crossing.near) for crossing in crossings if len(crossing.near) > 1]
    free = sum(len(near) - 1 for near in points) - 1
    if free < FEWEST_FREE:
        return None
    run, rise = np.concatenate([near - near.mean(axis=0) for near in points]).T
    squares = float(run @ run)
    if not float(run @ rise) > 0:
        return None
    value = float(run @ rise) / squares
    error = math.sqrt(float(((rise - value * run) ** 2).sum()) / free / squares)
    doubt = max(LEAST_DOUBT, error / value)
    return Slope(value, doubt, binding) if doubt <= MOST_DOUBT else None


def _line(a: _Try | None, b: _Try, sharp: float) -> Slope | None:
    """None if readings are too near, or the line leads away from the bound."""
    if a is None or a.criterion != b.criterion or not math.isfinite(a.severity + b.severity):
        return None
    run, rise = b.log_rate - a.log_rate, b.severity - a.severity
    if abs(run) < sharp / 2 or not run * rise > 0:
        return None
    return Slope(rise / run, LEAST_DOUBT + abs(run) / (BENT * sharp), b.criterion)


def _distance(end: _Try, line: Slope | None) -> float:
    """From a reading to the bound, in log rate; NaN if unknown."""
    if end.reading.worst < 0 and not end.reading.holds:
        # The queue grows: the capacity is the rate of requests leaving.
        return end.log_rate - math.log(end.reading.throughput)
    return math.nan if line is None else abs(end.log_rate - end.root(line))


def _between(below: _Try, above: _Try) -> float:
    """Log rate between two readings at which the SLOs probably stop being met."""
    low, high = below.log_rate, above.log_rate
    if above.reading.worst < 0:
        # A short run's last requests leave alone: its throughput may be below a rate at which all holds.
        return min(high, max(low, math.log(above.reading.throughput)))
    s, t = max(below.reading.severities), max(above.reading.severities)
    if not (math.isfinite(s) and math.isfinite(t) and t > s):
        return (low + high) / 2
    return low + (high - low) * -s / (t - s)
