"""The loop of one engine: schedule a step, run it, commit what came of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .engine import Engine
from .step import StepOutcome, StepPlan

Told = Callable[[StepPlan, StepOutcome, npt.NDArray[np.int32], float], object]


class Executor(Protocol):
    """Runs a step and says what came of it. It returns when the step is over."""

    def step(self, plan: StepPlan) -> StepOutcome:
        """The outcome of a plan, measured or predicted."""


def serve(
    engine: Engine,
    step: Callable[[StepPlan], StepOutcome],
    *,
    deliver: Callable[[float], bool],
    wait: Callable[[float], float | None],
    told: Told,
    clock: Callable[[], float] | None = None,
    now: float = 0.0,
) -> None:
    """Run steps from `now` (s) on, each from where the last one ended, until nothing more comes.

    deliver: submits the requests that are due to the engine; False ends the run. wait: called when the engine is idle;
    returns the time of the next call, or None if nothing more comes. told: called after each step with the step, the
    requests that it ended, and its end. clock: the time (s) that measures a step's latency, including planning,
    accounting and other host work. Without it the outcome's latency counts.
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
        now += outcome.latency  # the step's own end, as the journal has it
        told(plan, outcome, engine.commit(outcome, now), now)
