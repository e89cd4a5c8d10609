"""Distributions in constant memory: times in bins of 0.1 %, counts exactly."""

import math
from collections import Counter

import numpy as np
import numpy.typing as npt

# A bin is a float64's exponent and top ten mantissa bits: at most 1/1024 wide, no logarithm needed.
SHIFT = 52 - 10
SMALLEST = 2.0**-24  # s
FIRST_BIN = int(np.array(SMALLEST).view(np.int64)) >> SHIFT
NUM_BINS = 48 << 10  # up to 2^24 s
NO_COUNTS = np.broadcast_to(np.int64(0), NUM_BINS)  # read-only, without memory


class TimeHistogram:
    """Times (s) in bins 0.1 % wide; count, sum, min and max are exact."""

    def __init__(self, counts: "npt.NDArray[np.int64] | None" = None) -> None:
        self.counts = np.zeros(NUM_BINS, np.int64) if counts is None else counts
        self.count = 0
        self.sum = 0.0
        self.min = math.inf
        self.max = -math.inf

    def add(self, value: float, times: int = 1) -> None:
        mantissa, exponent = math.frexp(value)  # the same bin as in `bins`
        i = (exponent + 23 << 10) + int((2.0 * mantissa - 1.0) * 1024) if value > SMALLEST else 0
        self.counts[min(i, NUM_BINS - 1)] += times
        self.count += times
        self.sum += value * times
        self.min = min(self.min, value)
        self.max = max(self.max, value)

    def add_many(self, values: npt.NDArray[np.float64]) -> None:
        if not len(values):
            return
        np.add.at(self.counts, bins(values), 1)
        self.count += len(values)
        self.sum += float(np.cumsum(values)[-1])  # from left to right, like a loop
        self.min = min(self.min, float(values.min()))
        self.max = max(self.max, float(values.max()))

    def merge(self, other: "TimeHistogram") -> None:
        if other.counts is not NO_COUNTS:
            self.counts += other.counts
        self.count += other.count
        self.sum += other.sum
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)

    def mean(self) -> float:
        """Exact; NaN if empty."""
        return self.sum / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """The q-quantile, linear between two values as NumPy's, within half a bin (0.05 %); NaN if empty."""
        if not self.count:
            return math.nan
        rank = q * (self.count - 1)
        neighbours = np.minimum([int(rank), int(rank) + 1], self.count - 1)
        i = np.searchsorted(np.cumsum(self.counts), neighbours, side="right")
        edges = (np.stack([i, i + 1]) + FIRST_BIN << SHIFT).view(np.float64)
        low, high = edges.mean(axis=0).clip(self.min, self.max).tolist()
        return float(low + (rank - int(rank)) * (high - low))


def bins(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    inside: npt.NDArray[np.int64] = ((values.view(np.int64) >> SHIFT) - FIRST_BIN).clip(0, NUM_BINS - 1)
    return inside


class CountHistogram:
    """Small whole numbers, counted exactly."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, value: int, times: int = 1) -> None:
        self.counts[value] += times

    def merge(self, other: "CountHistogram") -> None:
        self.counts.update(other.counts)

    def quantile(self, q: float) -> float:
        """The q-quantile, the lower of two; NaN if empty."""
        rank = q * (self.counts.total() - 1)
        cumulative = 0
        for value in sorted(self.counts):
            cumulative += self.counts[value]
            if cumulative > rank:
                return float(value)
        return math.nan

    def mean(self) -> float:
        """NaN if empty."""
        total = self.counts.total()
        return sum(v * n for v, n in self.counts.items()) / total if total else math.nan
