"""Service-level objectives, `[class/][stat:]metric=bound`.

`ttft=2s` bounds each request; `p90:ttft=2s` the run's p90; `95%:ttft=2s` 95 % of arrivals. `chat/ttft=1s` and
`chat/p90:ttft=1s` cover requests with slo_class chat. `50ms/token` is `norm_latency=50ms`.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from ..engine.errors import DsimError
from ..files.read import cut, did_you_mean, quoted
from .metrics import METRICS, STATS

A_TOKEN = "norm_latency"  # metric of 50ms/token
METRIC_KEYS = tuple(name for name, metric in METRICS.items() if metric.slo)
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

_SHAPE = re.compile(r"(?:(?P<class>[^:=]*)/)?(?:(?P<stat>[^:=/]*):)?(?P<metric>[^:=/]*)=(?P<bound>[^:=]*)")
_A_TOKEN = re.compile(r"(?P<before>(?:[^:=]*/)?(?:[^:=/]*:)?)(?P<bound>[^:=/]*)/\s*token")
_SHARE = re.compile(r"(?P<percent>\d+\.?\d*|\.\d+)\s*%")
_BOUND = re.compile(r"(?P<number>\d+\.?\d*|\.\d+)\s*(?P<unit>[a-z]*)")


@dataclass(frozen=True)
class Slo:
    """A bound per request or, with `stat`, of the run."""

    metric: str  # one of METRIC_KEYS
    bound: float  # s
    stat: str | None = None  # of STATS, or "95%" of arrivals
    text: str = ""  # as written, with the metric's name
    slo_class: str | None = None  # None: all

    @property
    def share(self) -> float | None:
        """Of arrivals; None for another statistic."""
        return float(self.stat[:-1]) / 100 if self.stat is not None and self.stat.endswith("%") else None

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Read `ttft=2s`, `p90:tpot_chunk=50ms`, `95%:ttft=2s`, `chat/ttft=1s` or `50ms/token`."""
        spec, label = text.strip(), quoted(text)
        if plain := _A_TOKEN.fullmatch(spec):
            spec = f"{plain['before'].strip()}{A_TOKEN}={plain['bound'].strip()}"
        shape = _SHAPE.fullmatch(spec)
        if shape is None:
            raise DsimError(f"SLO {label}: expected [stat:]metric=bound, such as ttft=2s or 50ms/token")
        metric, stat, slo_class = shape["metric"].strip(), shape["stat"], shape["class"]
        check_metric(f"SLO {label}", metric, METRIC_KEYS)
        if stat is not None and (stat := stat.strip()) not in STATS:
            stat = _share(stat, label)
        if metric == "itl" and (stat is None or stat.endswith("%")):
            example = f"p99:itl={cut(shape['bound'].strip())}"
            raise DsimError(f"SLO {label}: itl is a list a request, so it needs a statistic, such as {example}")
        if slo_class is not None:
            slo_class = slo_class.strip()
            if not slo_class:
                raise DsimError(f"SLO {label}: the class is empty, expected one of the trace's, such as chat/ttft=1s")
            if metric == "itl":
                raise DsimError(f"SLO {label}: itl is pooled over all requests, expected no class")
        return cls(metric, _seconds(shape["bound"].strip(), label), stat, spec, slo_class)

    def check_class(self, classes: Collection[str]) -> None:
        """DsimError unless the trace has such requests."""
        if self.slo_class is not None and self.slo_class not in classes:
            text = f"holds {', '.join(sorted(classes))}" if classes else "has no column slo_class"
            problem = f"SLO {quoted(str(self))}: no request is of class {quoted(self.slo_class)}"
            raise DsimError(f"{problem}: the trace {cut(text, 400)}")

    def __str__(self) -> str:
        prefix = (f"{self.slo_class}/" if self.slo_class else "") + (f"{self.stat}:" if self.stat else "")
        return self.text or f"{prefix}{self.metric}={1e3 * self.bound:g}ms"


def check_metric(subject: str, metric: str, names: Collection[str]) -> None:
    if metric not in names:
        hint = did_you_mean(metric, names)
        raise DsimError(f"{subject}: unknown metric {quoted(metric)}{hint}, expected one of {', '.join(names)}")


def _share(stat: str, label: str) -> str:
    match = _SHARE.fullmatch(stat)
    if match is None:
        raise DsimError(
            f"SLO {label}: unknown statistic {quoted(stat)}, expected one of {', '.join(STATS)}, or a share such as 95%"
        )
    percent = float(match["percent"])
    if not 0 < percent <= 100:
        raise DsimError(f"SLO {label}: share of arrivals is {cut(stat)}, expected above 0% and up to 100%")
    return f"{percent:g}%"


def _seconds(bound: str, label: str) -> float:
    match = _BOUND.fullmatch(bound)
    if match is None:
        raise DsimError(f"SLO {label}: bound {quoted(bound)} is not a time above zero, such as 2s, 50ms or 800us")
    if match["unit"] not in UNITS:
        problem = f"unit {quoted(match['unit'])} is unknown" if match["unit"] else f"bound {quoted(bound)} has no unit"
        raise DsimError(f"SLO {label}: {problem}, expected s, ms or us")
    seconds = float(match["number"]) * UNITS[match["unit"]]
    if seconds <= 0:
        raise DsimError(f"SLO {label}: bound is {cut(bound)}, expected a time above zero")
    return seconds
