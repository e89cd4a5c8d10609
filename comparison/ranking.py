"""The twin's ranking of policies against the device's, and the cost of its choice."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..report.table import value
from ..results.metrics import METRICS, Floats, Summary, path
from .bounds import DISTRIBUTIONS

Values = Sequence[float] | Floats  # by policy

# By metric: path in a summary, whether more is better.
RANKED: dict[str, tuple[str, bool]] = {
    **{
        f"{stat}:{name}": (path(name, stat), False)
        for name in DISTRIBUTIONS
        if METRICS[name].slo and METRICS[name].stats
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


def rankings(policies: Sequence[str], predicted: Sequence[Summary], measured: Sequence[Summary]) -> dict[str, Verdict]:
    """Of each metric that all summaries have; empty below two policies."""
    if len(policies) < 2:
        return {}
    return {
        name: rank(policies, values[0], values[1], high=RANKED[name][1])
        for name, values in _by_metric(predicted, measured)
    }


def rank(policies: Sequence[str], predicted: Values, measured: Values, high: bool) -> Verdict:
    """Ties go to the first policy."""
    pick = np.argmax if high else np.argmin
    choice, best = int(pick(predicted)), int(pick(measured))
    loss = abs(measured[choice] - measured[best])
    regret = float(loss / measured[best]) if measured[best] else math.nan
    return Verdict(kendall_tau((predicted, measured)), policies[choice], policies[best], regret)


def pooled_taus(groups: Sequence[tuple[Sequence[Summary], Sequence[Summary]]]) -> dict[str, float]:
    """Tau by metric; only pairs within a group are compared."""
    known = [dict(_by_metric(*group)) for group in groups]
    return {name: kendall_tau(*(own[name] for own in known)) for name in RANKED if all(name in own for own in known)}


def _by_metric(predicted: Sequence[Summary], measured: Sequence[Summary]) -> Iterator[tuple[str, Floats]]:
    """Values [2, policies] of each metric that all summaries have."""
    for name, (keys, _) in RANKED.items():
        values = np.array([[value(summary, keys) for summary in side] for side in (predicted, measured)], np.float64)
        if not np.isnan(values).any():
            yield name, values


def kendall_tau(*groups: Floats | tuple[Values, Values]) -> float:
    """Kendall's tau-b: (concordant - discordant) pairs / geometric mean of the pairs untied on each side."""
    agree = untied_a = untied_b = 0.0
    for group in groups:
        a, b = (np.sign(np.subtract.outer(side, side)) for side in group)
        agree += (a * b).sum()
        untied_a += (a * a).sum()
        untied_b += (b * b).sum()
    return float(agree / math.sqrt(untied_a * untied_b)) if untied_a and untied_b else math.nan
