"""A sample: one server's counters at one moment, under dsim's names."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...traces.trace import Floats as Floats

MAX_REQUESTS = 100_000  # of a server at once, and between two readings
MEAN_GAUGES = ("kv_usage",)  # over engines; the others are sums


class Buckets(NamedTuple):
    """A Prometheus histogram."""

    ends: tuple[float, ...]  # upper ends, without +Inf
    counts: tuple[float, ...]  # at most each end, then all: cumulative
    total: float  # sum of the values

    @property
    def shares(self) -> Floats:
        """The share of the values in each bucket, the one beyond the last end included."""
        counts = np.diff(np.array((0.0, *self.counts)))
        return counts / max(1.0, self.counts[-1])

    @property
    def num(self) -> float:
        return self.counts[-1]

    @property
    def mean(self) -> float:
        """The mean; NaN without values."""
        return float("nan") if not self.num else self.total / self.num

    def minus(self, other: "Buckets | None") -> "Buckets":
        """The values added since `other`."""
        if other is None or other.ends != self.ends:
            return self
        counts = tuple(a - b for a, b in zip(self.counts, other.counts, strict=True))
        return Buckets(self.ends, counts, self.total - other.total)

    def plus(self, other: "Buckets") -> "Buckets":
        """The sum of two histograms with the same ends."""
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Buckets(self.ends, counts, self.total + other.total)


@dataclass(frozen=True)
class Sample:
    """One page of metrics; a server need not have all of them.

    Counters: requests (finished), prompt_tokens (of requests with a prefill that has begun), generation_tokens
    (emitted), steps (denoising row forwards), forward_seconds (device time), forwards (of batches).
    Gauges: running, waiting, kv_usage. Histograms: ttft, e2el, queue, input_length, output_length.
    """

    time: float  # s since 1970
    engine: str  # by the metric names on the page
    num_engines: int = 1  # behind the page
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Buckets] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)  # as the server states them

    @property
    def num_open(self) -> float:
        """Requests running or waiting."""
        return self.gauges["running"] + self.gauges["waiting"]

    @property
    def num_arrived(self) -> float:
        """Requests finished, running or waiting."""
        return self.counters["requests"] + self.num_open

    def follows(self, before: "Sample") -> bool:
        """Whether this is the same server, with the same settings and without a restart since `before`."""
        pairs = [(self.counters.get(name), value) for name, value in before.counters.items()]
        pairs += [(self.histograms[n].num, b.num) for n, b in before.histograms.items() if n in self.histograms]
        same = (self.engine, self.num_engines, self.settings) == (before.engine, before.num_engines, before.settings)
        return same and all(now is None or now >= then for now, then in pairs)

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> "Sample":
        """The sample of the store's line, which has its fields."""
        histograms = {name: Buckets(tuple(e), tuple(c), t) for name, (e, c, t) in line["histograms"].items()}
        return cls(**{**line, "histograms": histograms})
