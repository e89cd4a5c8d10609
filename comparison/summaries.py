"""A run's summary, checked against its requests and steps."""

import math
from typing import Any

import numpy as np

from ..engine.errors import DsimError
from ..engine.journal import STATUSES, StepTotals
from ..files.read import cut
from ..results.metrics import METRICS, path, summarize
from ..results.run import Run
from ..results.slo import Slo

TOLERANCE = 1e-6  # relative, for sums in another order
# What requests.parquet determines.
OF_REQUESTS = (
    "num_requests", *STATUSES, "duration_s", "request_throughput", "output_throughput", "total_token_throughput",
    "tokens_per_emission", "goodput", "slo_attainment",
    *(path(name) for name, metric in METRICS.items() if metric.of and name != "itl"),
)  # fmt: skip


def summary(run: Run, policy: str) -> dict[str, Any]:
    """A policy's summary; DsimError if requests or steps contradict the one in run.json.

    What a run lacks is computed, or null.
    """
    stored = next(held for held in run.info["policies"] if held["policy"] == policy)
    found = _again(run, policy)
    for name in OF_REQUESTS:
        if name in stored and name in found:
            _check(run, policy, name, stored[name], found[name])
    if not is_client(run):
        for name, value in _steps(run, policy).items():
            if name in stored:
                _check(run, policy, name, stored[name], value, "steps.parquet")
    return {**found, **stored}


def is_client(run: Run) -> bool:
    return run.info.get("driver") == "client"


def _again(run: Run, policy: str) -> dict[str, Any]:
    info = run.info
    slos = [Slo.parse(text) for text in info.get("slos", [])]
    judged = not any(slo.slo_class is not None for slo in slos)  # the file holds no classes
    found = summarize(
        policy,
        run.requests(policy),
        StepTotals(),
        slos if judged else [],
        missing_passes=info.get("missing_passes", True),
        replicas=info.get("replicas", 1),
        closed_loop=info.get("closed_loop", False),
    ).to_json()
    return found if judged else {k: v for k, v in found.items() if k not in ("goodput", "slo_attainment")}


def _steps(run: Run, policy: str) -> dict[str, int]:
    prefill = run.steps(policy, ["prefill"])["prefill"]
    return {"num_prefill_steps": int(prefill.sum()), "num_decode_steps": int((~prefill).sum())}


def _check(run: Run, policy: str, name: str, stored: Any, found: Any, source: str = "requests.parquet") -> None:
    if isinstance(stored, dict):
        for stat, value in stored.items():
            if isinstance(found, dict) and stat in found:
                _check(run, policy, f"{name}.{stat}", value, found[stat], source)
        return
    a, b = (math.nan if x is None else x for x in (stored, found))
    if not isinstance(a, int | float) or not np.isclose(a, b, rtol=TOLERANCE, atol=0, equal_nan=True):
        raise DsimError(
            f"{run.folder}/run.json: {name} of {cut(policy)} is {cut(stored)}, {source} next to it gives "
            f"{found}: the summary was edited or is another run's"
        )
