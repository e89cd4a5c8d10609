"""The server's driver: it runs what an engine plans, in real time, for requests that come from other threads."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..engine.engine import Engine
from ..engine.journal import StepRecorder
from ..engine.step import StepPlan
from ..live.loop import Executor
from .inbox import Inbox

Clock = Callable[[], float]
Told = Callable[[StepPlan, npt.NDArray[np.int32]], None]  # a committed step, and the requests that ended with it


def drive(
    engine: Engine, executor: Executor, inbox: Inbox, clock: Clock, told: Told, recorder: StepRecorder | None = None
) -> None:
    """Serve until the inbox says stop. A step begins where the last one ended, or when an idle engine has news."""
    now = clock()
    while not inbox.stopped or _has_ended_rows(engine):
        inbox.deliver(engine, now)
        plan = engine.schedule(now)
        if plan is None:
            if inbox.stopped:
                return
            inbox.wait()
            now = max(now, clock())
            continue
        outcome = executor.step(plan)
        outcome = replace(outcome, latency=max(0.0, clock() - now))
        now += outcome.latency  # the step's own end, as the journal has it
        done = engine.commit(outcome, now)
        if recorder is not None:
            recorder.record(engine.replica, plan, outcome, done)
        told(plan, done)


def _has_ended_rows(engine: Engine) -> bool:
    """Whether all that an engine has left to do is the rows of requests that are over, decided on before they were."""
    return not (engine.idle or engine.num_running or engine.num_waiting)
