"""A follower's metrics for Prometheus."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from .follower import Follower
from .residuals import CAUSES

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

# By the name after `dsim_follow_`: the label of its rows, if any, and its help text.
METRICS = {
    "up": ("url", "Whether the server answered the last time."),
    "age_seconds": ("", "Time since the last window that was judged."),
    "version": ("", "The profile's version that is in force."),
    "requests_rate": ("", "Arrivals of the last window."),
    "capacity": ("", "Arrivals that the fleet takes within its SLOs."),
    "headroom": ("", "Capacity less arrivals."),
    "measured_seconds": ("metric", "Mean of the last window, by the server."),
    "predicted_seconds": ("metric", "Mean of the last window, by the twin."),
    "residual": ("quantity", "Moving average of ln(measured / predicted)."),
    "deviation": ("quantity", "Standard deviation of a window's residual."),
    "alarm": ("cause", "Whether a cause is open."),
    "extrapolating": ("", "Whether the load lies beyond what the profile was fitted to."),
    "attainment": ("what_if", "Share of requests within the SLOs, by the twin."),
    "replicas": ("", "Replicas that serve."),
}
Value = float | None  # None: not known


def values_of(follower: Follower, now: float) -> dict[str, Value | Mapping[str, Value]]:
    """By metric, its value, or one a row."""
    capacity = follower.capacity
    values: dict[str, Value | Mapping[str, Value]] = {
        "version": follower.version,
        "capacity": capacity,
        "alarm": {cause: cause in follower.alarms.open for cause in CAUSES},
    }
    if follower.last is not None:
        pairs = zip(follower.followed.urls, follower.last.samples, strict=True)
        values["up"] = {url: sample is not None for url, sample in pairs}
    if follower.windows:
        last = follower.windows[-1]
        rate = last["traffic"]["rate"]
        values |= {
            "age_seconds": now - last["end"],
            "requests_rate": rate,
            "replicas": last["replicas"],
            "extrapolating": last["extrapolating"],
            "measured_seconds": last["measured"],
            "predicted_seconds": last["predicted"],
            "residual": last["smooth"],
            "deviation": last["deviations"],
            "attainment": {outcome["name"]: outcome["attainment"] for outcome in last.get("what_if", ())},
        }
        if capacity is not None:
            values["headroom"] = capacity - rate
    return values


class Collector:
    """Collects a follower's metrics when Prometheus asks."""

    def __init__(self, follower: Follower, clock: Callable[[], float] = time.time) -> None:
        self._follower, self._clock = follower, clock

    def collect(self) -> "Iterator[GaugeMetricFamily]":
        from prometheus_client.core import GaugeMetricFamily

        for name, value in values_of(self._follower, self._clock()).items():
            label, about = METRICS[name]
            gauge = GaugeMetricFamily(f"dsim_follow_{name}", about, labels=[label] * bool(label))
            if not isinstance(value, Mapping):
                value = {"": value}
            for row, number in value.items():
                if number is not None and math.isfinite(number):
                    gauge.add_metric([row] * bool(label), float(number))
            if gauge.samples:
                yield gauge


def serve(follower: Follower, host: str, port: int) -> str:
    """Serve the metrics in a thread; return their address. OSError if the port is taken."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(follower))
    server, _ = start_http_server(port, host, registry)
    return f"http://{host}:{server.server_port}/metrics"
