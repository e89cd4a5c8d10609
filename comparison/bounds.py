"""Bounds on errors, `[stat:]metric=percent`.

`e2el=3%` bounds the requests' mean relative error (MAPE), of paired requests; `mean:e2el=15%` the error of the run's
mean; so do p50, p90, p95 and p99.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.errors import DsimError
from ..files.read import cut, quoted
from ..report.table import number
from ..results.metrics import METRICS, STATS, led_by
from ..results.slo import check_metric

DISTRIBUTIONS = tuple(name for name in led_by("e2el", "norm_latency") if METRICS[name].unit == "ms")

_SHAPE = re.compile(r"(?:(?P<stat>[^:=]*):)?(?P<metric>[^:=]*)=\s*(?P<percent>\d+\.?\d*|\.\d+)\s*%")


@dataclass(frozen=True)
class Bound:
    text: str  # as written
    metric: str
    stat: str | None  # None: MAPE
    most: float  # share

    @classmethod
    def parse(cls, text: str) -> "Bound":
        """Read `e2el=3%` or `p95:ttft=10%`."""
        shape, shown = _SHAPE.fullmatch(text.strip()), quoted(text)
        if shape is None:
            raise DsimError(f"bound {shown}: expected [stat:]metric=percent, such as e2el=3% or mean:e2el=15%")
        stat, metric = shape["stat"], shape["metric"]
        check_metric(f"bound {shown}", metric, DISTRIBUTIONS)
        if stat is not None and stat not in STATS:
            raise DsimError(f"bound {shown}: unknown statistic {quoted(stat)}, expected one of {', '.join(STATS)}")
        if stat is None and metric == "step_latency":
            raise DsimError(
                f"bound {shown}: steps are not requests: expected a statistic, such as mean:{cut(text.strip())}"
            )
        return cls(text.strip(), metric, stat, float(shape["percent"]) / 100)


@dataclass(frozen=True)
class Judged:
    bound: str
    cell: str
    value: float  # share; NaN (no such metric) misses the bound
    most: float
    met: bool

    def __str__(self) -> str:
        value = "no value" if math.isnan(self.value) else f"{number(100 * self.value)} %"
        return f"{self.bound}: {self.cell} has {value}, {'kept' if self.met else 'missed'}"


def judge(bound: Bound, cell: str, metrics: Mapping[str, Any], unpaired: str) -> Judged:
    """Judge a bound; DsimError if it is on unpaired requests."""
    metric = metrics[bound.metric]
    if bound.stat is not None:
        value = abs(metric.error[bound.stat])
    elif metric.requests is None:
        raise DsimError(
            f"bound {quoted(bound.text)}: the requests of {cell} are not paired, since {unpaired}: expected a "
            f"statistic, such as mean:{cut(bound.text)}"
        )
    else:
        value = metric.requests.mape
    return Judged(bound.text, cell, value, bound.most, value <= bound.most)
