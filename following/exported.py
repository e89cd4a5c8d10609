"""A follower's metrics as Prometheus text."""

import math
from collections.abc import Mapping

from .follower import Follower
from .residuals import CAUSES

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
    samples = () if follower.last is None else follower.last.samples
    urls, capacity = follower.followed.urls, follower.capacity
    values: dict[str, Value | Mapping[str, Value]] = {
        "up": {url: sample is not None for url, sample in zip(urls, samples, strict=False)},
        "version": follower.version, "capacity": capacity,
        "alarm": {cause: cause in follower.alarms.open for cause in CAUSES},
    }  # fmt: skip
    if follower.windows:
        last = follower.windows[-1]
        rate = last["traffic"]["rate"]
        values |= {
            "age_seconds": now - last["end"], "requests_rate": rate, "replicas": last["replicas"],
            "headroom": None if capacity is None else capacity - rate, "extrapolating": last["extrapolating"],
            "measured_seconds": last["measured"], "predicted_seconds": last["predicted"],
            "residual": last["smooth"], "deviation": last["deviations"],
            "attainment": {outcome["name"]: outcome["attainment"] for outcome in last.get("what_if", ())},
        }  # fmt: skip
    return values


def exposition(follower: Follower, now: float) -> str:
    """The text of /metrics."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest  # imported here: it takes long

    registry = CollectorRegistry()
    for name, value in values_of(follower, now).items():
        label, about = METRICS[name]
        rows = value if isinstance(value, Mapping) else {"": value}
        numbers = {row: number for row, number in rows.items() if number is not None and math.isfinite(number)}
        if numbers:  # a gauge without a value would show 0
            gauge = Gauge(f"dsim_follow_{name}", about, [label] if label else [], registry=registry)
            for row, number in numbers.items():
                (gauge.labels(row) if label else gauge).set(number)
    return generate_latest(registry).decode()
