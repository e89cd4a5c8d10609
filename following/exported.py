"""A follower's metrics as Prometheus text."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .follower import Follower
from .residuals import CAUSES

Rows = Iterator[tuple[dict[str, str], float | None]]


@dataclass(frozen=True)
class Exported:
    """A metric. A function of the follower and the time (s since 1970) gives its values."""

    name: str  # behind dsim_follow_
    about: str
    values: Callable[[Follower, float], Rows]


def _last(follower: Follower) -> dict[str, Any]:
    return follower.windows[-1] if follower.windows else {}


def _one(read: Callable[[Follower, float], float | None]) -> Callable[[Follower, float], Rows]:
    def values(follower: Follower, now: float) -> Rows:
        yield {}, read(follower, now)

    return values


def _each(key: str, label: str) -> Callable[[Follower, float], Rows]:
    def values(follower: Follower, now: float) -> Rows:
        for name, value in _last(follower).get(key, {}).items():
            yield {label: name}, value

    return values


def _up(follower: Follower, now: float) -> Rows:
    samples = () if follower.last is None else follower.last.samples
    for url, sample in zip(follower.followed.urls, samples, strict=False):
        yield {"url": url}, float(sample is not None)


def _alarms(follower: Follower, now: float) -> Rows:
    for cause in CAUSES:
        yield {"cause": cause}, float(cause in follower.alarms.open)


def _what_if(follower: Follower, now: float) -> Rows:
    for outcome in _last(follower).get("what_if", ()):
        yield {"what_if": outcome["name"]}, outcome["attainment"]


def _headroom(follower: Follower, _now: float) -> float | None:
    if follower.capacity is None or not follower.windows:
        return None
    rate: float = _last(follower)["traffic"]["rate"]
    return follower.capacity - rate


METRICS = (
    Exported("up", "Whether the server answered the last time.", _up),
    Exported(
        "age_seconds", "Time since the last window that was judged.",
        _one(lambda f, now: now - _last(f)["end"] if f.windows else None),
    ),
    Exported("version", "The profile's version that is in force.", _one(lambda f, _: float(f.version))),
    Exported("requests_rate", "Arrivals of the last window.",
             _one(lambda f, _: _last(f).get("traffic", {}).get("rate"))),
    Exported("capacity", "Arrivals that the fleet takes within its SLOs.",
             _one(lambda f, _: f.capacity)),
    Exported("headroom", "Capacity less arrivals.", _one(_headroom)),
    Exported("measured_seconds", "Mean of the last window, by the server.", _each("measured", "metric")),
    Exported("predicted_seconds", "Mean of the last window, by the twin.", _each("predicted", "metric")),
    Exported("residual", "Moving average of ln(measured / predicted).", _each("smooth", "quantity")),
    Exported("deviation", "Standard deviation of a window's residual.", _each("deviations", "quantity")),
    Exported("alarm", "Whether a cause is open.", _alarms),
    Exported("extrapolating", "Whether the load lies beyond what the profile was fitted to.",
             _one(lambda f, _: float(_last(f)["extrapolating"]) if f.windows else None)),
    Exported("attainment", "Share of requests within the SLOs, by the twin.", _what_if),
    Exported("replicas", "Replicas that serve.", _one(lambda f, _: _last(f).get("replicas"))),
)  # fmt: skip


def exposition(follower: Follower, now: float) -> str:
    """The text of /metrics."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest  # imported here: it takes long

    registry = CollectorRegistry()
    for metric in METRICS:
        values = metric.values(follower, now)
        rows = [(labels, value) for labels, value in values if value is not None and math.isfinite(value)]
        if not rows:  # a gauge without a value would show 0
            continue
        gauge = Gauge(f"dsim_follow_{metric.name}", metric.about, list(rows[0][0]), registry=registry)
        for labels, value in rows:
            (gauge.labels(**labels) if labels else gauge).set(value)
    return generate_latest(registry).decode()
