"""The server's driver: it runs what an engine plans, in real time, for requests that come from other threads."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..engine.engine import Engine
from ..engine.journal import StepRecorder
from ..engine.loop import Executor, serve
from ..engine.step import StepOutcome, StepPlan
from .inbox import Inbox

Clock = Callable[[], float]
Told = Callable[[StepPlan, npt.NDArray[np.int32]], None]  # a committed step, and the requests that ended with it


def drive(
    engine: Engine, executor: Executor, inbox: Inbox, clock: Clock, told: Told, recorder: StepRecorder | None = None
) -> None:
    """Serve until the inbox says stop. A step begins where the last one ended, or when an idle engine has news."""

    def deliver(now: float) -> bool:
        if inbox.stopped and not _has_ended_rows(engine):
            return False
        inbox.deliver(engine, now)
        return True

    def wait(now: float) -> float | None:
        if inbox.stopped:
            return None
        inbox.wait()
        return max(now, clock())

    def ended(plan: StepPlan, outcome: StepOutcome, done: npt.NDArray[np.int32], _now: float) -> None:
        if recorder is not None:
            recorder.record(engine.replica, plan, outcome, done)
        told(plan, done)

    serve(engine, executor.step, deliver=deliver, wait=wait, told=ended, clock=clock, now=clock())


def _has_ended_rows(engine: Engine) -> bool:
    """Whether all that an engine has left to do is the rows of requests that are over, decided on before they were."""
    return not (engine.idle or engine.num_running or engine.num_waiting)
