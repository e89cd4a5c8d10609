"""Counters and histograms of one replica, in the published metrics' buckets.

The replica's thread writes; others read.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate

from .metric import NO_LABELS, Metric, Values

DISTRIBUTIONS = ("histogram", "summary")  # kinds; a summary has one bucket


class Buckets:
    """Counts of values per bucket: above the edge before, up to its own."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times

    @property
    def cumulative(self) -> list[int]:
        """Values up to each edge, then all."""
        return list(accumulate(self.counts.copy()))

    def merge(self, other: "Buckets") -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum


class Tallies:
    def __init__(self, metrics: Iterable[Metric], context_limit: int) -> None:
        self.counters: dict[str, dict[Values, float]] = {}
        self.histograms: dict[str, dict[Values, Buckets]] = {}
        self._edges: dict[str, tuple[float, ...]] = {}
        self._of: dict[str, list[Metric]] = defaultdict(list)
        for metric in metrics:
            if not isinstance(metric.value, str):
                continue
            self._of[metric.value].append(metric)
            if metric.kind in DISTRIBUTIONS:
                edges = self._edges[metric.name] = metric.edges_up_to(context_limit)
                self.histograms[metric.name] = {values: Buckets(edges) for values in metric.seeded}
            else:
                self.counters[metric.name] = dict.fromkeys(metric.seeded, 0.0)

    def of(self, metric: Metric) -> Mapping[Values, float | Buckets]:
        """A copy of a metric's values by labels."""
        found: Mapping[Values, float | Buckets]
        found = self.histograms[metric.name] if metric.kind in DISTRIBUTIONS else self.counters[metric.name]
        return dict(found)

    def add(self, quantity: str, value: float, labels: Mapping[str, str] = NO_LABELS, times: int = 1) -> None:
        """In every metric that shows the quantity."""
        for metric in self._of.get(quantity, ()):
            values = tuple(labels[name] for name in metric.labels)
            if metric.kind in DISTRIBUTIONS:
                series = self.histograms[metric.name]
                if values not in series:
                    series[values] = Buckets(self._edges[metric.name])
                series[values].add(value, times)
            else:
                counts = self.counters[metric.name]
                counts[values] = counts.get(values, 0.0) + value * times
