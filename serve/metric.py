"""A published metric: its name in a release, and the quantity of this server that it shows."""

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


@dataclass(frozen=True)
class Metric:
    """One metric of a release.

    value: the name of a quantity that tallies count, or a function that reads it when the metrics are asked for.
    labels: those that it adds to the labels of its scope. edges: of a histogram; None: 1, 2, 5, 10 ... up to the
    context limit. seeded: label values that are shown before anything was counted.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    value: str | Callable[[Fleet, Replica], Shown]
    about: str
    labels: tuple[str, ...] = ()
    edges: tuple[float, ...] | None = None
    scope: Literal["engine", "server", "bare"] = "engine"
    seeded: tuple[Values, ...] = ()
    only: Literal["masks", "tokens"] | None = None  # of policies whose rows commit these

    def edges_up_to(self, context_limit: int) -> tuple[float, ...]:
        """The upper ends of its buckets."""
        if self.edges is not None:
            return self.edges
        steps = (m * 10**e for e in range(len(str(context_limit))) for m in (1, 2, 5))
        return tuple(float(n) for n in steps if n <= context_limit)


@dataclass(frozen=True)
class Face:
    """The metrics that an engine's release publishes and this server knows."""

    engine: str
    release: str
    metrics: tuple[Metric, ...]
    labels: Callable[[str, int, int], Mapping[str, str]]  # of an engine: by model, its index, and the count
    server_labels: tuple[str, ...]  # those that metrics of the whole server have
    settings: Callable[[Fleet, str], dict[str, Any] | None]  # what /server_info says; None: it has no such route


def gauge(name: str, value: Callable[[Fleet, Replica], Shown], about: str, labels: tuple[str, ...] = ()) -> Metric:
    """A gauge, read when the metrics are asked for."""
    return Metric(name, "gauge", value, about, labels)


def counter(
    name: str, value: str | Callable[[Fleet, Replica], Shown], about: str, labels: tuple[str, ...] = (),
    seeded: tuple[Values, ...] = (),
) -> Metric:  # fmt: skip
    """A counter of an engine."""
    return Metric(name, "counter", value, about, labels, seeded=seeded or (() if labels else ((),)))


def histogram(
    name: str, value: str, about: str, edges: tuple[float, ...] | None, labels: tuple[str, ...] = ()
) -> Metric:
    """A histogram of an engine."""
    return Metric(name, "histogram", value, about, labels, edges, seeded=() if labels else ((),))
