"""The loop of one engine: schedule a step, run it, commit its outcome."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .engine import Engine
from .step import StepOutcome, StepPlan

StepCallback = Callable[[StepPlan, StepOutcome, npt.NDArray[np.int32], float], object]


class Executor(Protocol):
    def step(self, plan: StepPlan) -> StepOutcome:
        """A plan's outcome, measured or predicted."""


def serve(
    engine: Engine,
    step: Callable[[StepPlan], StepOutcome],
    *,
    deliver: Callable[[float], bool],
    wait: Callable[[float], float | None],
    on_step: StepCallback,
    clock: Callable[[], float] | None = None,
    now: float = 0.0,
) -> None:
    """Run steps from `now` (s) on until nothing more comes.

    deliver: submits the requests that are due; False ends the run. wait: called when idle; returns the time of the next
    call, or None. on_step: called after each step with its plan, outcome, finished requests and end. clock: measures
    latency (s) including host work; without it the outcome's latency counts.
    """
    while deliver(now):
        plan = engine.schedule(now)
        if plan is None:
            later = wait(now)
            if later is None:
                return
            now = later
            continue
        outcome = step(plan)
        if clock is not None:
            outcome = replace(outcome, latency=max(0.0, clock() - now))
        now += outcome.latency  # as the journal has it
        on_step(plan, outcome, engine.commit(outcome, now), now)
