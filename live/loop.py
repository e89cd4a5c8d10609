"""The live driver: requests arrive in real time, and an executor runs what the engine plans."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from ..engine.engine import Engine
from ..engine.journal import StepRecorder
from ..engine.request import Request
from ..engine.step import StepOutcome, StepPlan


class Executor(Protocol):
    """Runs a step and says what came of it. It returns when the step is over."""

    def step(self, plan: StepPlan) -> StepOutcome:
        """The measured outcome of a plan."""


def serve(
    engine: Engine,
    executor: Executor,
    requests: Iterable[Request],
    *,
    recorder: StepRecorder | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Serve requests, in order of arrival, at their times (s from the start); returns the seconds it took.

    A request that is due is submitted before the next step is planned, as an arrival in the twin is.
    """
    begin = clock()
    coming = iter(requests)
    due = next(coming, None)
    while True:
        now = clock() - begin
        while due is not None and due.arrival <= now:
            engine.submit(due)
            due = next(coming, None)
        plan = engine.schedule(now)
        if plan is None:
            if due is None:
                return clock() - begin
            sleep(max(0.0, due.arrival - (clock() - begin)))
            continue
        outcome = executor.step(plan)
        done = engine.commit(outcome, now + outcome.latency)  # the step's own end, as the journal has it
        if recorder is not None:
            recorder.record(engine.replica, plan, outcome, done)
