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
TRUSTED = 2.0  # widths to reach over which a known slope leads to the bound
NEAR = 0.15  # log rate around a capacity within which severities rise along a line
FEWEST_POINTS = 4  # of a common slope, beside one in each replication


@dataclass(frozen=True)
class Slope:
    """Rise of a criterion's severity with the log rate, where the severity is near 0."""

    value: float
    criterion: int  # index


@dataclass(frozen=True)
class Crossing:
    """A replication's capacity."""

    rate: float  # req/s
    binding: int  # criterion broken just above; -1: the queue grows
    rejected: float  # share
    num_replays: int
    near: Sequence[tuple[float, float]] = ()  # log rates near the capacity, and severities


def find(
    read: Callable[[float], Reading],
    criteria: Sequence[Criterion],
    centre: float,
    width: float,
    sharp: float,
    slope: Slope | None = None,
) -> Crossing:
    """The rate at which readings stop holding, within a relative `sharp`.

    From `centre` the search steps by `width` in log rate, doubled each time, or along `slope` (of other replications),
    until readings lie on both sides; then to where a line through them meets the bound. It ends when both are within
    `sharp`, or a line leads from the last reading to the bound over a short enough distance.
    """
    readings: dict[float, Reading] = {}  # by log rate
    log_rate, gap = math.log(centre), math.inf
    below, above, before = -math.inf, math.inf, log_rate
    while True:
        reading = readings[log_rate] = read(math.exp(log_rate))
        if reading.holds:
            below = log_rate
        else:
            above = log_rate
        bracketed = math.isfinite(above - below)
        line, reach = slope, TRUSTED * sharp
        if bracketed:
            gap, last = above - below, gap
            if gap <= sharp:
                root = _between(below, above, readings)
                return _crossing(root, readings[above].worst, readings)
        if line is None:
            ends = [(before, log_rate), (below, above)][bracketed]
            line = _line(*ends, readings)
            reach = sharp / 2 * math.isfinite(above)  # only a known slope leads above all readings
        root = _root(log_rate, reading, line)
        if reading.stable and below <= root <= above and abs(root - log_rate) <= reach:
            return _crossing(root, reading.criterion, readings)
        if bracketed:
            edge = max(0.1 * gap, 0.4 * sharp)
            middle = _between(below, above, readings) if gap <= last / 2 else (below + above) / 2
            log_rate = min(max(middle, below + edge), above - edge)
            continue
        if math.log(centre) - above > LOWEST:
            raise never(criteria, reading)
        before, step = log_rate, width
        if not math.isnan(root):
            step = min(max(abs(root - log_rate) + sharp / 4, sharp / 2), 2 * width)  # slightly beyond, for a bracket
        width *= 2
        if not reading.holds:
            step = -step
        log_rate = max(log_rate + step, math.log(centre) - 1.01 * LOWEST)


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


def common_slope(crossings: Sequence[Crossing]) -> Slope | None:
    """Slope of parallel lines through replications' readings, by least squares; None if unknown or SLOs differ."""
    binding = crossings[0].binding
    if binding < 0 or any(crossing.binding != binding for crossing in crossings):
        return None
    points = [np.array(crossing.near) for crossing in crossings if len(crossing.near) > 1]
    if sum(map(len, points)) < FEWEST_POINTS:
        return None
    run, rise = np.concatenate([near - near.mean(axis=0) for near in points]).T
    value = float(run @ rise) / float(run @ run)
    return Slope(value, binding) if value > 0 else None


def _crossing(log_rate: float, binding: int, readings: dict[float, Reading]) -> Crossing:
    near = []
    for place, reading in readings.items():
        is_near = abs(place - log_rate) <= NEAR
        if is_near and reading.stable and reading.criterion == binding and math.isfinite(reading.severity):
            near.append((place, reading.severity))
    return Crossing(
        rate=math.exp(log_rate),
        binding=binding,
        rejected=max(reading.rejected for reading in readings.values()),
        num_replays=len(readings),
        near=near,
    )


def _line(place: float, other: float, readings: dict[float, Reading]) -> Slope | None:
    """Through two readings; None if different criteria bind, a queue grows, or it leads away from the bound."""
    first, second = readings[place], readings[other]
    rise = second.severity - first.severity
    is_line = first.stable and second.stable and first.criterion == second.criterion and math.isfinite(rise)
    if not is_line or not rise * (other - place) > 0:
        return None
    return Slope(rise / (other - place), first.criterion)


def _root(log_rate: float, reading: Reading, line: Slope | None) -> float:
    """Log rate at which a line from a reading meets the bound; NaN if unknown."""
    if not reading.stable:
        # Where only the queue grows, the capacity is the rate of requests leaving.
        return math.log(reading.throughput) if reading.worst < 0 else math.nan
    if line is None or line.criterion != reading.criterion or not math.isfinite(reading.severity):
        return math.nan
    return log_rate - reading.severity / line.value


def _between(below: float, above: float, readings: dict[float, Reading]) -> float:
    """Log rate between two readings at which the SLOs probably stop being met."""
    low, high = readings[below], readings[above]
    if high.worst < 0:
        # A short run's last requests leave alone: its throughput may be below a rate at which all holds.
        return min(above, max(below, math.log(high.throughput)))
    rise = high.severity - low.severity
    if not (math.isfinite(rise) and rise > 0):
        return (below + above) / 2
    return below - (above - below) * low.severity / rise
