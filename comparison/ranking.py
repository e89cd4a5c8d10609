"""The twin's ranking of policies against the device's, and the cost of its choice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..report.table import value
from ..results.metrics import METRICS, Floats, Summary, path
from .bounds import DISTRIBUTIONS

STATS = ("mean", "p99")
# Path in a summary by metric. Of latencies less is better, of throughputs more.
LATENCIES = {
    f"{stat}:{name}": path(name, stat)
    for name in DISTRIBUTIONS
    if METRICS[name].slo and METRICS[name].stats
    for stat in STATS
}
THROUGHPUTS = {"output_throughput": "output_throughput", "goodput": "goodput"}
DEFINITIONS = {
    "tau": "Kendall's tau-b of the policies' order: 1 the same order, -1 the reverse; none where one side is all ties",
    "regret": "how much worse than the best policy the twin's choice is, both as measured, relative to the best",
}


@dataclass(frozen=True)
class Verdict:
    """Of one metric; None if undefined."""

    tau: float | None
    choice: str  # best predicted
    best: str  # best measured
    regret: float | None  # of the choice's measurement over the best, relative


def values_by_metric(predicted: Sequence[Summary], measured: Sequence[Summary]) -> dict[str, Floats]:
    """Values [2, policies] of each metric that all summaries have."""
    values = {}
    for name, keys in (LATENCIES | THROUGHPUTS).items():
        rows = np.array([[value(summary, keys) for summary in side] for side in (predicted, measured)], np.float64)
        if not np.isnan(rows).any():
            values[name] = rows
    return values


def rank(policies: Sequence[str], values: Floats, metric: str) -> Verdict:
    """Ties go to the first policy. values: [2, policies], predicted and measured."""
    predicted, measured = -values if metric in THROUGHPUTS else values
    choice, best = int(np.argmin(predicted)), int(np.argmin(measured))
    regret = (measured[choice] - measured[best]) / abs(measured[best]) if measured[best] else None
    return Verdict(kendall_tau([values]), policies[choice], policies[best], None if regret is None else float(regret))


def kendall_tau(groups: Sequence[npt.ArrayLike]) -> float | None:
    """Kendall's tau-b: (concordant - discordant) pairs / geometric mean of the pairs untied on each side.

    groups: [2, policies] each; only pairs within a group are compared.
    """
    agree = untied_a = untied_b = 0.0
    for group in groups:
        a, b = (np.sign(np.subtract.outer(side, side)) for side in np.asarray(group))
        agree += (a * b).sum()
        untied_a += (a * a).sum()
        untied_b += (b * b).sum()
    return float(agree / math.sqrt(untied_a * untied_b)) if untied_a and untied_b else None
