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

_SHAPE = re.compile(r"(?:(?P<class>[^:=]*[^:=\s][^:=]*)/)?(?:(?P<stat>[^:=/]*):)?(?P<metric>[^:=/]*)=(?P<bound>[^:=]*)")
_PER_TOKEN = re.compile(r"^(?P<before>(?:[^:=]*/)?(?:[^:=/]*:)?)(?P<bound>[^:=/]*?)\s*/\s*token$")
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
        if self.stat is None or not self.stat.endswith("%"):
            return None
        return float(self.stat[:-1]) / 100

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Read `ttft=2s`, `p90:tpot_chunk=50ms`, `95%:ttft=2s`, `chat/ttft=1s` or `50ms/token`."""
        label = quoted(text)
        spec = _PER_TOKEN.sub(rf"\g<before>{A_TOKEN}=\g<bound>", text.strip())
        shape = _SHAPE.fullmatch(spec)
        if shape is None:
            raise DsimError(f"SLO {label}: expected [class/][stat:]metric=bound, such as ttft=2s or 50ms/token")
        metric, stat, slo_class = (shape[name] and shape[name].strip() for name in ("metric", "stat", "class"))
        check_metric(f"SLO {label}", metric, METRIC_KEYS)
        if stat is not None and stat not in STATS:
            stat = _share(stat, label)
        if metric == "itl" and (slo_class is not None or stat not in STATS):
            raise DsimError(f"SLO {label}: itl is pooled over all requests, expected a statistic and no class: p99:itl")
        return cls(metric, _seconds(shape["bound"].strip(), label), stat, text=spec, slo_class=slo_class)

    def check_class(self, classes: Collection[str]) -> None:
        """DsimError unless the trace has such requests."""
        if self.slo_class is not None and self.slo_class not in classes:
            names = cut(", ".join(sorted(classes)) or "no column slo_class", 400)
            problem = f"SLO {quoted(str(self))}: no request is of class {quoted(self.slo_class)}"
            raise DsimError(f"{problem}: the trace holds {names}")

    def __str__(self) -> str:
        prefix = f"{self.slo_class or ''}/".lstrip("/") + f"{self.stat or ''}:".lstrip(":")
        return self.text or f"{prefix}{self.metric}={1e3 * self.bound:g}ms"


def check_metric(subject: str, metric: str, names: Collection[str]) -> None:
    if metric not in names:
        hint = did_you_mean(metric, names)
        raise DsimError(f"{subject}: unknown metric {quoted(metric)}{hint}, expected one of {', '.join(names)}")


def _share(stat: str, label: str) -> str:
    match = _SHARE.fullmatch(stat)
    if match is None or not 0 < float(match["percent"]) <= 100:
        raise DsimError(
            f"SLO {label}: statistic is {quoted(stat)}, expected one of {', '.join(STATS)}, or a share above 0% and up "
            "to 100%"
        )
    return f"{float(match['percent']):g}%"


def _seconds(bound: str, label: str) -> float:
    match = _BOUND.fullmatch(bound)
    seconds = match and float(match["number"]) * UNITS.get(match["unit"], 0.0)
    if not seconds:
        raise DsimError(f"SLO {label}: bound is {quoted(bound)}, expected a time above zero in s, ms or us, such as 2s")
    return seconds
