"""A run's summary, checked against its requests and steps."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..engine.errors import DsimError
from ..engine.journal import STATUSES, StepTotals
from ..files.read import cut
from ..report.table import value
from ..results.metrics import LATENCIES, STATS, Summary, path, summarize
from ..results.run import Run
from ..results.slo import Slo

TOLERANCE = 1e-6  # relative, for sums in another order
OF_SLOS = ("goodput", "slo_attainment")
# Of the summary, what requests.parquet and steps.parquet determine.
OF_REQUESTS = (
    "num_requests", *STATUSES, "duration_s", "request_throughput", "output_throughput",
    *OF_SLOS,
    *(path(name, stat) for name in LATENCIES if name != "itl" for stat in STATS),
)  # fmt: skip
OF_STEPS = ("num_prefill_steps", "num_decode_steps")


def summary(run: Run, policy: str) -> Summary:
    """A policy's summary in run.json; DsimError if requests or steps contradict it."""
    stored, computed = run.info.summary(policy), _of_requests(run, policy)
    has_classes = any(Slo.parse(text).slo_class is not None for text in run.info.slos)  # the file holds no classes
    names = [name for name in OF_REQUESTS if not (has_classes and name in OF_SLOS)]
    _check(run, stored, computed, names, "requests.parquet")
    if not is_client(run):
        prefill = run.steps(policy, ["prefill"])["prefill"]
        counted = replace(computed, num_prefill_steps=int(prefill.sum()), num_decode_steps=int((~prefill).sum()))
        # A run that keeps no steps has no counts.
        names = [name for name in OF_STEPS if value(stored, name) is not None]
        _check(run, stored, counted, names, "steps.parquet")
    return stored


def is_client(run: Run) -> bool:
    return run.info.driver == "client"


def _of_requests(run: Run, policy: str) -> Summary:
    info = run.info
    slos = [slo for slo in map(Slo.parse, info.slos) if slo.slo_class is None]
    return summarize(
        policy, run.requests(policy), StepTotals(), slos,
        replicas=info.replicas, closed_loop=info.closed_loop,
    )  # fmt: skip


def _check(run: Run, stored: Summary, computed: Summary, names: Sequence[str], source: str) -> None:
    for name in names:
        a, b = (math.nan if x is None else x for x in (value(stored, name), value(computed, name)))
        if not np.isclose(a, b, rtol=TOLERANCE, atol=0, equal_nan=True):
            raise DsimError(
                f"{run.folder}/run.json: {name} of {cut(stored.policy)} is {a:.9g}, {source} next to it "
                f"gives {b:.9g}: the summary was edited or is another run's"
            )
