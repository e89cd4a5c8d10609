"""What counts as good enough: `[stat:]metric=bound`, a bound every good request meets or, with a statistic, the run."""

import re
from dataclasses import dataclass

from ..engine.errors import DsimError

METRIC_KEYS = ("ttft", "ttfb", "tpot", "tpot_chunk", "norm_latency", "e2el", "itl")
STATS = ("mean", "p50", "p90", "p95", "p99")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

_SHAPE = re.compile(r"(?:(?P<stat>[^:=]*):)?(?P<metric>[^:=]*)=(?P<bound>[^:=]*)")
_BOUND = re.compile(r"(?P<number>\d+\.?\d*|\.\d+)\s*(?P<unit>[a-z]*)")


@dataclass(frozen=True)
class Slo:
    """One bound on a latency metric. Without `stat` each request is judged; with it the run is."""

    metric: str  # one of METRIC_KEYS
    bound: float  # s
    stat: str | None = None  # one of STATS
    text: str = ""  # as the user wrote it

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Read `ttft=2s` or `p90:tpot_chunk=50ms`; a DsimError names what is unknown and lists what is known."""
        spec = text.strip()
        shape = _SHAPE.fullmatch(spec)
        if shape is None:
            raise DsimError(f"SLO '{text}': expected [stat:]metric=bound, such as ttft=2s or p90:tpot_chunk=50ms")
        metric, stat = shape["metric"].strip(), shape["stat"]
        if metric not in METRIC_KEYS:
            raise DsimError(f"SLO '{text}': unknown metric '{metric}', expected one of {', '.join(METRIC_KEYS)}")
        if stat is not None and (stat := stat.strip()) not in STATS:
            raise DsimError(f"SLO '{text}': unknown statistic '{stat}', expected one of {', '.join(STATS)}")
        if metric == "itl" and stat is None:
            raise DsimError(f"SLO '{text}': itl is a list a request, so it needs a statistic, such as p99:{spec}")
        return cls(metric, _seconds(shape["bound"].strip(), text), stat, spec)

    def __str__(self) -> str:
        return self.text or f"{self.stat + ':' if self.stat else ''}{self.metric}={self.bound:g}s"


def _seconds(bound: str, text: str) -> float:
    found = _BOUND.fullmatch(bound)
    if found is None:
        raise DsimError(f"SLO '{text}': bound '{bound}' is not a time above zero, such as 2s, 50ms or 800us")
    if found["unit"] not in UNITS:
        what = f"unit '{found['unit']}' is unknown" if found["unit"] else f"bound '{bound}' has no unit"
        raise DsimError(f"SLO '{text}': {what}, expected s, ms or us")
    seconds = float(found["number"]) * UNITS[found["unit"]]
    if seconds <= 0:
        raise DsimError(f"SLO '{text}': bound is {bound}, expected a time above zero")
    return seconds
