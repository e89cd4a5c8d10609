"""The twin's ranking of policies against the device's, and the cost of its choice."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..report.table import value

Json = Mapping[str, Any]

# By metric: path in a summary, whether more is better.
RANKED: dict[str, tuple[str, bool]] = {
    **{
        f"{stat}:{name}": (f"{name}_ms.{stat}", False)
        for name in ("e2el", "norm_latency", "ttft", "tpot", "tpot_chunk", "itl")
        for stat in ("mean", "p99")
    },
    "output_throughput": ("output_throughput", True),
    "goodput": ("goodput", True),
}
DEFINITIONS = {
    "tau": "Kendall's tau-b of the policies' order: 1 the same order, -1 the reverse; none where one side is all ties",
    "regret": "how much worse than the best policy the twin's choice is, both as measured, relative to the best",
}


@dataclass(frozen=True)
class Verdict:
    """Of one metric; NaN if undefined."""

    tau: float
    choice: str  # best predicted
    best: str  # best measured
    regret: float  # of the choice's measurement over the best, relative


def rankings(policies: Sequence[str], predicted: Sequence[Json], measured: Sequence[Json]) -> dict[str, Verdict]:
    """Of each metric that all summaries have; empty below two policies."""
    found = {}
    for name, (path, high) in RANKED.items():
        p, m = ([value(summary, path) for summary in side] for side in (predicted, measured))
        if len(policies) > 1 and None not in p and None not in m:
            found[name] = rank(policies, [v or 0.0 for v in p], [v or 0.0 for v in m], high)
    return found


def rank(policies: Sequence[str], predicted: Sequence[float], measured: Sequence[float], high: bool) -> Verdict:
    """Ties go to the first policy."""
    pick = max if high else min
    choice, best = (values.index(pick(values)) for values in (list(predicted), list(measured)))
    loss = abs(measured[choice] - measured[best])
    regret = loss / measured[best] if measured[best] else math.nan
    return Verdict(kendall_tau((predicted, measured)), policies[choice], policies[best], regret)


def pooled_taus(groups: Sequence[tuple[Sequence[Json], Sequence[Json]]]) -> dict[str, float]:
    """Tau by metric; only pairs within a group are compared."""
    found = {}
    for name, (path, _) in RANKED.items():
        sides = [([value(s, path) for s in p], [value(s, path) for s in m]) for p, m in groups]
        known = [([v or 0.0 for v in p], [v or 0.0 for v in m]) for p, m in sides if None not in p and None not in m]
        if len(known) == len(groups):
            found[name] = kendall_tau(*known)
    return found


def kendall_tau(*groups: tuple[Sequence[float], Sequence[float]]) -> float:
    """Kendall's tau-b: (concordant - discordant) pairs / geometric mean of the pairs untied on each side."""
    agree = untied_a = untied_b = 0
    for a, b in groups:
        for i in range(len(a)):
            for j in range(i):
                x, y = _sign(a[i] - a[j]), _sign(b[i] - b[j])
                agree += x * y
                untied_a += x * x
                untied_b += y * y
    return agree / math.sqrt(untied_a * untied_b) if untied_a and untied_b else math.nan


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
