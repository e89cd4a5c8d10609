"""Measured costs of full-sequence caches on top of the features: choosing and packing keys, finding changes, votes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import PolicyError
from .jit import is_ours
from .latency import Features, LatencyModel
from .spec import PRESETS, Policy
from .step import Phase, StepPlan

Floats = npt.NDArray[np.float64]
PHASES = tuple(phase.name.lower() for phase in Phase)
# Caches of the shipped scripts, and their implementations.
CACHES = {
    type(p.policy.cache).__name__: p.policy.implementation for p in PRESETS.values() if p.policy.batching.pads
}  # fmt: skip


def table_of(latency: LatencyModel, cache: object) -> Floats:
    """Seconds per row, and per token of its request, by phase, [phases, 2]; 0 where not measured."""
    table = np.zeros((len(PHASES), 2))
    kind = _measured_as(cache)
    for term in latency.cache_overhead:
        if term.cache == kind:
            table[PHASES.index(term.phase)] = term.row, term.token
    return table


def implementation_of(policy: Policy) -> str:
    """The code whose costs a policy's steps have: as declared, or that of the cache it is measured as; empty: any."""
    return policy.implementation or CACHES.get(_measured_as(policy.cache), "")


def _measured_as(cache: object) -> str:
    """The shipped cache whose overhead applies: as declared, the cache itself, or its shipped base."""
    declared = getattr(cache, "overhead", None)
    if declared not in (None, "none", *CACHES):
        raise PolicyError(f"{type(cache).__name__}.overhead is {declared!r}, expected {', '.join(CACHES)} or none")
    kinds = (kind.__name__ for kind in type(cache).__mro__ if is_ours(kind))
    return declared or next(kinds, "none")


def of_rows(
    table: Floats, phases: npt.NDArray[Any], prompt: npt.NDArray[Any], end: npt.NDArray[Any], block: int
) -> Floats:
    """Seconds of each row; end: of the output, computed in whole blocks."""
    length = prompt + -(-(end.astype(np.int64) - prompt) // block) * block
    seconds: Floats = table[phases, 0] + table[phases, 1] * length
    return seconds


def of_plan(table: Floats, plan: StepPlan) -> float:
    if not table.any():
        return 0.0
    return float(of_rows(table, plan.phases, plan.prompt, plan.end, plan.window.shape[1]).sum())


def price_of_plan(latency: LatencyModel, table: Floats, plan: StepPlan, late: Features | None = None) -> float:
    """A plan's latency (s) with its rows' overhead, as `latency.price` has it; late: features after an eviction."""
    return latency.step(plan.features, late, plan.first) + of_plan(table, plan)
