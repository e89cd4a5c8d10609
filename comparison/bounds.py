"""Bounds on errors, `[stat:]metric=percent`.

`e2el=3%` bounds the requests' mean relative error (MAPE), of paired requests; `mean:e2el=15%` the error of the run's
mean; so do p50, p90, p95 and p99.
"""

import re
from dataclasses import dataclass

from ..engine.errors import DsimError
from ..files.read import cut, quoted
from ..report.table import number
from ..results.metrics import LATENCIES, METRICS, STATS, led_by
from ..results.slo import check_metric

DISTRIBUTIONS = tuple(name for name in led_by("e2el", "norm_latency") if METRICS[name].unit == "ms")
PER_REQUEST = tuple(name for name in DISTRIBUTIONS if name in LATENCIES)

_SHAPE = re.compile(r"(?:(?P<stat>[^:=]*):)?(?P<metric>[^:=]*)=\s*(?P<percent>\d+\.?\d*|\.\d+)\s*%")


@dataclass(frozen=True)
class Bound:
    text: str  # as written
    metric: str
    stat: str | None  # None: MAPE
    limit: float  # share

    @classmethod
    def parse(cls, text: str) -> "Bound":
        """Read `e2el=3%` or `p95:ttft=10%`."""
        text = text.strip()
        shape, name = _SHAPE.fullmatch(text), f"bound {quoted(text)}"
        if shape is None:
            raise DsimError(f"{name}: expected [stat:]metric=percent, such as e2el=3% or mean:e2el=15%")
        stat, metric = shape["stat"], shape["metric"]
        check_metric(name, metric, DISTRIBUTIONS)
        if stat is not None and stat not in STATS:
            raise DsimError(f"{name}: unknown statistic {quoted(stat)}, expected one of {', '.join(STATS)}")
        if stat is None and metric == "step_latency":
            raise DsimError(f"{name}: steps are not requests: expected a statistic, such as mean:{cut(text)}")
        return cls(text, metric, stat, float(shape["percent"]) / 100)


@dataclass(frozen=True)
class Judged:
    bound: str
    cell: str
    value: float | None  # share; None (no such metric) misses the bound
    limit: float
    met: bool

    def __str__(self) -> str:
        verdict = {True: "kept", False: "missed"}[self.met]
        if self.value is None:
            return f"{self.bound}: {self.cell} has no value, {verdict}"
        return f"{self.bound}: {self.cell} has {number(100 * self.value)} %, {verdict}"
