"""A published metric: its name in a release, and what it shows of this server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .fleet import Fleet
    from .replica import Replica

Values = tuple[str, ...]  # of a metric's labels
Shown = float | Mapping[Values, float]
NO_LABELS: Mapping[str, str] = {}
OWN = ("engine", "bare")  # scopes whose series are one replica's


@dataclass(frozen=True)
class Metric:
    """One metric of a release.

    value: a quantity that tallies count, or a function called at each request. labels: in addition to the scope's.
    edges: of a histogram; None: 1, 2, 5, 10 ... up to the context limit. scope: a key of Face.scopes; series of scopes
    other than OWN are sums over replicas. seeded: label values shown before anything is counted.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram", "summary"]
    value: str | Callable[[Fleet, Replica], Shown]
    about: str
    labels: tuple[str, ...] = ()
    edges: tuple[float, ...] | None = None
    scope: str = "engine"
    seeded: tuple[Values, ...] = ()
    only: Literal["masks", "tokens"] | None = None  # for policies whose rows commit these

    def edges_up_to(self, context_limit: int) -> tuple[float, ...]:
        """Upper edges of its buckets."""
        if self.edges is not None:
            return self.edges
        steps = (m * 10**e for e in range(len(str(context_limit))) for m in (1, 2, 5))
        return tuple(float(n) for n in steps if n <= context_limit)


@dataclass(frozen=True)
class Face:
    """Metrics of an engine's release that this server has."""

    engine: str
    release: str
    metrics: tuple[Metric, ...]
    scopes: Mapping[str, Callable[[str, int, int], Mapping[str, str]]]  # labels by model, index and number of engines
    settings: Callable[[Fleet, str], dict[str, Any] | None]  # content of /server_info; None: no such route
    handles: bool = False  # a request waits for one of max_batch handles, and its latencies begin with it
    one_process: bool = True  # its page has the metrics of its own process: Python, memory, files
    dated: bool = False  # counters, histograms and summaries have `_created` series


def no_labels(model: str, index: int, count: int) -> Mapping[str, str]:
    """The labels of a scope without any."""
    return NO_LABELS


def gauge(name: str, value: Callable[[Fleet, Replica], Shown], about: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "gauge", value, about, labels)


def counter(
    name: str, value: str | Callable[[Fleet, Replica], Shown], about: str, labels: tuple[str, ...] = (),
    seeded: tuple[Values, ...] = (),
) -> Metric:  # fmt: skip
    return Metric(name, "counter", value, about, labels, seeded=seeded or (() if labels else ((),)))


def histogram(
    name: str, value: str, about: str, edges: tuple[float, ...] | None, labels: tuple[str, ...] = ()
) -> Metric:
    return Metric(name, "histogram", value, about, labels, edges, seeded=() if labels else ((),))
