"""Arrivals like BurstGPT's: windows of Gamma gaps with changing rate and burstiness.

Streams are superposed and cut into windows. A window's rate is a day curve times a random factor; its Gamma shape is
about 1 (calm) or well below (bursty). Its renewal process starts in equilibrium, so it expects exactly rate x length
arrivals.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..engine import chance
from ..engine.errors import TraceError
from .fits import gamma_shape
from .trace import Floats, Ints, Trace, check_rate

Keys: TypeAlias = npt.NDArray[np.uint64]

CELLS = 1_000_000  # draws in memory
LEAST_GAPS = 20  # needed to fit a window's shape
BURSTY_BELOW = 0.7  # shape, in a fit
DAY = 86_400.0  # s

# Draws in a window.
FACTOR, IS_BURSTY, SHAPE, FIRST_GAP, FIRST_SHARE, GAP = range(6)


@dataclass(frozen=True, slots=True)
class BurstGPTLike:
    """Parameters; docs/traffic.md has the CV and Fano factors of the defaults."""

    window: float = 60.0  # s
    num_streams: int = 2  # independent, of equal rate
    day_swing: float = 0.6  # the day curve is 1 + day_swing * cos(2 pi (hour - peak_hour) / 24)
    peak_hour: float = 15.0
    start_hour: float = 9.0  # at the trace's start
    rate_cv: float = 0.5  # of window rates around the day curve (Gamma)
    bursty_share: float = 0.5  # of the windows
    calm_shape: float = 1.0
    bursty_low: float = 0.2  # bursty shapes are uniform between these
    bursty_high: float = 0.5

    def __post_init__(self) -> None:
        for name, low, high in (
            ("window", 1e-3, 1e9), ("num_streams", 1, 64), ("day_swing", 0, 1), ("peak_hour", 0, 24),
            ("start_hour", 0, 24), ("rate_cv", 0, 30), ("bursty_share", 0, 1), ("calm_shape", 1e-2, 1e6),
            ("bursty_low", 1e-2, 1e6), ("bursty_high", self.bursty_low, 1e6),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise TraceError(f"burstgpt-like {name} is {value}, expected {low:g} to {high:g}")


def burstgpt_like(
    num_requests: int, rate: float, seed: int, parameters: BurstGPTLike = BurstGPTLike(), horizon: float | None = None
) -> Floats:
    """Times (s), the first at 0. rate: req/s, mean over `horizon` s (default num_requests / rate)."""
    check_rate(rate)
    p = parameters
    num_windows = math.ceil((horizon or num_requests / rate) / p.window)
    mean_factor = float(np.mean([window_factors(p, seed, s, np.arange(num_windows)) for s in range(p.num_streams)]))
    scale = rate / p.num_streams / mean_factor
    found: list[Floats] = []
    total = start = 0
    # Later windows supply what the horizon lacks.
    while total <= num_requests:
        expected = scale * p.window * (1 + p.day_swing) * 2
        size = max(1, min(num_windows, int(CELLS / (expected + 64))))
        windows = np.arange(start, start + size)
        times = np.concatenate([stream_times(p, seed, s, windows, scale) for s in range(p.num_streams)])
        found.append(np.sort(times, kind="stable"))
        total += len(times)
        start += size
    arrival = np.concatenate(found)[:num_requests]
    return np.asarray(arrival - arrival[0], np.float64)


def stream_times(p: BurstGPTLike, seed: int, stream: int, windows: Ints, scale: float) -> Floats:
    """A stream's arrivals in these windows, in order."""
    from scipy.special import gammaincinv

    key = chance.key(seed, chance.ARRIVAL, 1 + stream, windows)
    rates = scale * window_factors(p, seed, stream, windows)
    shapes = window_shapes(p, key)
    # [windows]: in equilibrium the current gap is length-biased (Gamma of shape + 1), its rest a uniform share.
    whole = np.asarray(gammaincinv(shapes + 1, draw(key, FIRST_GAP)), np.float64) / (shapes * rates)
    first = whole * draw(key, FIRST_SHARE)
    mean = rates * p.window
    num_gaps = math.ceil(float((mean + 4 * np.sqrt(mean / shapes)).max())) + 16
    while True:
        index = np.arange(num_gaps)
        u = draw(key[:, None], GAP, index)  # [windows, gaps]
        gaps = gammaincinv(shapes[:, None], u) / (shapes * rates)[:, None]
        times = first[:, None] + np.concatenate((np.zeros((len(windows), 1)), np.cumsum(gaps, axis=1)), axis=1)
        if (times[:, -1] >= p.window).all():
            break
        num_gaps *= 2
    inside = times < p.window
    return np.asarray((times + (windows * p.window)[:, None])[inside], np.float64)


def window_factors(p: BurstGPTLike, seed: int, stream: int, windows: Ints) -> Floats:
    """Relative to the day's mean."""
    from scipy.special import gammaincinv

    hour: Floats = p.start_hour + (windows + 0.5) * p.window / 3600
    day = 1 + p.day_swing * np.cos(2 * np.pi * (hour - p.peak_hour) / 24)
    if p.rate_cv > 0:
        shape = p.rate_cv**-2
        day = day * gammaincinv(shape, draw(chance.key(seed, chance.ARRIVAL, 1 + stream, windows), FACTOR)) / shape
    # 0 would give infinite gaps.
    return np.asarray(np.maximum(day, 1e-3), np.float64)


def window_shapes(p: BurstGPTLike, key: Keys) -> Floats:
    bursty = p.bursty_low + (p.bursty_high - p.bursty_low) * draw(key, SHAPE)
    return np.where(draw(key, IS_BURSTY) < p.bursty_share, bursty, p.calm_shape)


def draw(key: Keys, what: int, index: Ints | int = 0) -> Floats:
    return chance.uniform(chance.key(key, what, index))


def fit_burstgpt_like(trace: Trace, window: float = 60.0) -> BurstGPTLike:
    """One stream's parameters: window rates, and a Gamma shape for each window with enough gaps.

    The day curve needs a day. TraceError if fewer than four windows have enough gaps.
    """
    index = np.floor(trace.arrival / window).astype(np.int64)
    num_windows = int(trace.duration // window)
    edges = np.searchsorted(index, np.arange(num_windows + 1))
    counts = np.diff(edges).astype(np.float64)
    shapes = []
    for w in np.flatnonzero(counts > LEAST_GAPS).tolist():
        gaps = np.diff(trace.arrival[edges[w] : edges[w + 1]])
        gaps = gaps[gaps > 0]
        if len(gaps) >= LEAST_GAPS:
            shapes.append(gamma_shape(gaps))
    if len(shapes) < 4:
        raise TraceError(
            f"{trace.name} has {len(shapes)} windows of {window:g} s with {LEAST_GAPS} gaps, expected at least 4"
        )
    shape = np.array(shapes)
    bursty = shape[shape < BURSTY_BELOW]
    calm = shape[shape >= BURSTY_BELOW]
    swing, peak = day_curve(counts, window) if trace.duration >= DAY else (0.0, 0.0)
    hours = (np.arange(num_windows) + 0.5) * window / 3600
    level = counts / (1 + swing * np.cos(2 * np.pi * (hours - peak) / 24))
    # Chance adds the gaps' squared CV over the mean count.
    spread = float(level.var() / level.mean() ** 2 - np.mean(1 / shape) / level.mean())
    low, high = np.quantile(bursty, (0.1, 0.9)).tolist() if len(bursty) else (0.2, 0.5)
    return BurstGPTLike(
        window=window,
        num_streams=1,
        day_swing=swing,
        peak_hour=peak,
        start_hour=0.0,
        rate_cv=min(math.sqrt(max(spread, 0.0)), 30.0),
        bursty_share=len(bursty) / len(shape),
        calm_shape=float(np.median(calm)) if len(calm) else 1.0,
        bursty_low=low,
        bursty_high=high,
    )


def day_curve(counts: Floats, window: float) -> tuple[float, float]:
    """Swing and peak hour of the counts' first daily harmonic; the trace starts at hour 0."""
    phase = 2 * np.pi * (np.arange(len(counts)) + 0.5) * window / DAY
    whole = counts[: int(len(counts) * window // DAY * DAY / window)]
    wave = np.exp(1j * phase[: len(whole)])
    harmonic = 2 * np.mean(whole * wave) / whole.mean()
    return min(float(abs(harmonic)), 1.0), float(np.angle(harmonic) * 24 / (2 * np.pi)) % 24
