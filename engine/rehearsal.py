"""A run's first steps with its rules from outside in Python, where they are checked, before they are compiled."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import numpy as np

from .core import answers_of
from .engine import Engine, Limits
from .jit import is_ours
from .journal import RequestTable
from .latency import LatencyModel
from .part import Policy
from .request import Request
from .state import MASKED
from .step import StepOutcome, StepPlan

REQUESTS, STEPS = 8, 48
STEP = 0.03  # s


def rehearse(policy: Policy, limits: Limits, requests: Iterable[Request], latency: LatencyModel | None = None) -> None:
    """Run a few steps of the first requests, in order of arrival; every row commits a token a step.

    PolicyError, or what the rule raised, at the first wrong answer.
    """
    if policy.checked or all(map(is_ours, answers_of(policy).values())):
        return
    engine = Engine(replace(policy, checked=True), limits, RequestTable(REQUESTS), latency=latency)
    arrivals = [replace(request, index=i) for i, request in enumerate(islice(requests, REQUESTS))]
    now = 0.0
    for _ in range(STEPS):
        while arrivals and arrivals[0].arrival <= now:
            engine.submit(arrivals.pop(0))
        plan = engine.schedule(now)
        if plan is None:
            if not arrivals:
                return
            now = arrivals[0].arrival
            continue
        now += STEP
        engine.commit(StepOutcome(STEP, _commits(policy, plan)), now)


def _commits(policy: Policy, plan: StepPlan) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Each row's first computed mask; of next tokens all."""
    if policy.rows.commits == "tokens":
        return plan.window.copy()
    masks = plan.window & (plan.status == MASKED)
    return masks & (masks.cumsum(axis=1) == 1)
