"""Distributions kept in constant memory: times in bins of 0.1 %, counts exactly."""

import math

import numpy as np
import numpy.typing as npt

SMALLEST = 1e-7  # s
BINS_PER_E = 1000  # bins per factor e: a bin is 0.1 % wide
NUM_BINS = 32_000  # up to about 7.9e6 s


class TimeHistogram:
    """Times (s) counted in logarithmic bins 0.1 % wide; the count, sum, least and greatest are exact."""

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(NUM_BINS, np.int64)
        self.count = 0
        self.sum = 0.0
        self.min = math.inf
        self.max = -math.inf

    def add(self, value: float, times: int = 1) -> None:
        """Count one value `times` times."""
        i = int(math.log(max(value, SMALLEST) / SMALLEST) * BINS_PER_E)
        self.counts[min(i, NUM_BINS - 1)] += times
        self.count += times
        self.sum += value * times
        self.min = min(self.min, value)
        self.max = max(self.max, value)

    def add_many(self, values: npt.NDArray[np.float64]) -> None:
        """Count every value of an array."""
        if not len(values):
            return
        bins = (np.log(np.maximum(values, SMALLEST) / SMALLEST) * BINS_PER_E).astype(np.int64)
        np.add.at(self.counts, np.minimum(bins, NUM_BINS - 1), 1)
        self.count += len(values)
        self.sum += float(values.sum())
        self.min = min(self.min, float(values.min()))
        self.max = max(self.max, float(values.max()))

    def merge(self, other: "TimeHistogram") -> None:
        """Add another histogram's counts to this one's."""
        self.counts += other.counts
        self.count += other.count
        self.sum += other.sum
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)

    def mean(self) -> float:
        """The exact mean; NaN when empty."""
        return self.sum / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """The q-quantile, right to half a bin (0.05 %); NaN when empty."""
        if not self.count:
            return math.nan
        rank = q * (self.count - 1)
        i = int(np.searchsorted(np.cumsum(self.counts), rank, side="right"))
        middle = SMALLEST * math.exp((i + 0.5) / BINS_PER_E)
        return min(max(middle, self.min), self.max)


class CountHistogram:
    """Small whole numbers, counted exactly."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, value: int) -> None:
        """Count one value."""
        self.counts[value] = self.counts.get(value, 0) + 1

    def merge(self, other: "CountHistogram") -> None:
        """Add another histogram's counts to this one's."""
        for value, times in other.counts.items():
            self.counts[value] = self.counts.get(value, 0) + times

    def quantile(self, q: float) -> float:
        """The q-quantile, the lower of two; NaN when empty."""
        rank = q * (sum(self.counts.values()) - 1)
        seen = 0
        for value in sorted(self.counts):
            seen += self.counts[value]
            if seen > rank:
                return float(value)
        return math.nan

    def mean(self) -> float:
        """The mean; NaN when empty."""
        total = sum(self.counts.values())
        return sum(v * n for v, n in self.counts.items()) / total if total else math.nan
