"""A run's summary, checked against its requests and steps."""

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ..engine.errors import DsimError
from ..engine.journal import STATUSES, StepTotals
from ..files.read import cut
from ..results.metrics import METRICS, Distribution, Summary, path, summarize
from ..results.run import Run
from ..results.slo import Slo

TOLERANCE = 1e-6  # relative, for sums in another order
# What requests.parquet determines.
OF_REQUESTS = (
    "num_requests", *STATUSES, "duration_s", "request_throughput", "output_throughput", "total_token_throughput",
    "tokens_per_emission", "goodput", "slo_attainment",
    *(path(name) for name, metric in METRICS.items() if metric.of and name != "itl"),
)  # fmt: skip


def summary(run: Run, policy: str) -> Summary:
    """A policy's summary; DsimError if requests or steps contradict the one in run.json.

    What a run lacks is computed, or null.
    """
    stored = run.info.summary(policy)
    computed = _again(run, policy)
    by_class = any(Slo.parse(text).slo_class is not None for text in run.info.slos)  # the file holds no classes
    for name in OF_REQUESTS:
        if not (by_class and name in ("goodput", "slo_attainment")):
            _check(run, policy, name, getattr(stored, name), getattr(computed, name))
    if not is_client(run):
        for name, value in _steps(run, policy).items():
            if getattr(stored, name) is not None:
                _check(run, policy, name, getattr(stored, name), value, "steps.parquet")
    held = {field.name: getattr(stored, field.name) for field in fields(stored)}
    return replace(computed, **{name: value for name, value in held.items() if value is not None})


def is_client(run: Run) -> bool:
    return run.info.driver == "client"


def _again(run: Run, policy: str) -> Summary:
    info = run.info
    slos = [slo for slo in map(Slo.parse, info.slos) if slo.slo_class is None]
    return summarize(
        policy,
        run.requests(policy),
        StepTotals(),
        slos,
        missing_passes=info.missing_passes,
        replicas=info.replicas,
        closed_loop=info.closed_loop,
    )


def _steps(run: Run, policy: str) -> dict[str, int]:
    prefill = run.steps(policy, ["prefill"])["prefill"]
    return {"num_prefill_steps": int(prefill.sum()), "num_decode_steps": int((~prefill).sum())}


def _check(run: Run, policy: str, name: str, stored: Any, found: Any, source: str = "requests.parquet") -> None:
    if isinstance(stored, Distribution):
        for stat, value in vars(stored).items():
            _check(run, policy, f"{name}.{stat}", value, getattr(found, stat), source)
        return
    a, b = (math.nan if x is None else x for x in (stored, found))
    if not isinstance(a, int | float) or not np.isclose(a, b, rtol=TOLERANCE, atol=0, equal_nan=True):
        raise DsimError(
            f"{run.folder}/run.json: {name} of {cut(policy)} is {cut(stored)}, {source} next to it gives "
            f"{found}: the summary was edited or is another run's"
        )
