"""A run's summary, checked against its requests and steps."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..engine.errors import DsimError
from ..engine.journal import STATUSES, StepTotals
from ..files.read import cut
from ..report.table import value
from ..results.metrics import METRICS, STATS, path, summarize
from ..results.run import Run
from ..results.slo import Slo

TOLERANCE = 1e-6  # relative, for sums in another order
# Of the summary, what requests.parquet and steps.parquet determine.
OF_REQUESTS = (
    "num_requests", *STATUSES, "duration_s", "request_throughput", "output_throughput", "total_token_throughput",
    "tokens_per_emission", "goodput", "slo_attainment",
    *(path(name, stat) for name, metric in METRICS.items() if metric.of and name != "itl" for stat in STATS),
)  # fmt: skip
OF_STEPS = ("num_prefill_steps", "num_decode_steps")


def summary(run: Run, policy: str) -> dict[str, Any]:
    """A policy's summary; DsimError if requests or steps contradict the one in run.json.

    What a run lacks is computed, or null.
    """
    [stored] = [summary for summary in run.info["policies"] if summary["policy"] == policy]
    computed = _of_requests(run, policy)
    _check(run, stored, computed, OF_REQUESTS, "requests.parquet")
    if not is_client(run):
        prefill = run.steps(policy, ["prefill"])["prefill"]
        counts = {"num_prefill_steps": prefill.sum(), "num_decode_steps": (~prefill).sum()}
        _check(run, stored, counts, OF_STEPS, "steps.parquet")
    return {**computed, **stored}


def is_client(run: Run) -> bool:
    return run.info.get("driver") == "client"


def _of_requests(run: Run, policy: str) -> dict[str, Any]:
    info = run.info
    slos = [Slo.parse(text) for text in info.get("slos", [])]
    has_classes = any(slo.slo_class is not None for slo in slos)  # the file holds no classes
    computed = summarize(
        policy, run.requests(policy), StepTotals(), [] if has_classes else slos,
        missing_passes=info.get("missing_passes", True), replicas=info.get("replicas", 1),
        closed_loop=info.get("closed_loop", False),
    ).to_json()  # fmt: skip
    if has_classes:
        del computed["goodput"], computed["slo_attainment"]
    return computed


def _check(
    run: Run, stored: Mapping[str, Any], computed: Mapping[str, Any], names: tuple[str, ...], source: str
) -> None:
    for name in names:
        first = name.partition(".")[0]
        if first not in stored or first not in computed:
            continue
        a, b = (math.nan if x is None else x for x in (value(stored, name), value(computed, name)))
        if not np.isclose(a, b, rtol=TOLERANCE, atol=0, equal_nan=True):
            raise DsimError(
                f"{run.folder}/run.json: {name} of {cut(stored['policy'])} is {a:.9g}, {source} next to it "
                f"gives {b:.9g}: the summary was edited or is another run's"
            )
