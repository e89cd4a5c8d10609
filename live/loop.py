"""The live driver: requests arrive in real time, and an executor runs what the engine plans."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
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
    sleep: Callable[[float], object] = time.sleep,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, float], None] | None = None,
) -> float:
    """Serve requests, in order of arrival, at their times (s from the start); returns the seconds it took.

    A request that is due is submitted before the next step is planned, as an arrival in the twin is. A step begins
    where the last one ended, or when the first request of an idle engine is seen, and its latency runs from there:
    planning, accounting and the executor's own host time are inside it, so that no time is lost between steps.
    stop: asked between steps; when true the run ends there, with what is done.
    progress: called with the requests ended so far and the time.
    """
    begin = clock()
    coming = iter(requests)
    due = next(coming, None)
    now = clock() - begin
    ended = 0
    while not stop():
        while due is not None and due.arrival <= now:
            ended += not engine.submit(due)
            due = next(coming, None)
        plan = engine.schedule(now)
        if plan is None:
            if due is None:
                break
            sleep(max(0.0, due.arrival - (clock() - begin)))
            now = max(now, clock() - begin)
            continue
        outcome = executor.step(plan)
        outcome = replace(outcome, latency=max(0.0, clock() - begin - now))
        now += outcome.latency  # the step's own end, as the journal has it
        done = engine.commit(outcome, now)
        ended += len(done)
        if recorder is not None:
            recorder.record(engine.replica, plan, outcome, done)
        if progress is not None:
            progress(ended, now)
    return clock() - begin
