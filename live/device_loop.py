"""The live driver: requests arrive in real time, and an executor runs the plans."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from ..engine import loop
from ..engine.discipline import EMPTY_STEP
from ..engine.engine import Engine
from ..engine.journal import StepRecorder
from ..engine.loop import Executor
from ..engine.request import Request
from ..engine.step import StepOutcome, StepPlan


def serve(
    engine: Engine,
    executor: Executor,
    requests: Iterable[Request],
    *,
    concurrency: int | None = None,
    recorder: StepRecorder | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, float], None] | None = None,
    meanwhile: list[Callable[[], object]] | None = None,
) -> float:
    """Serve requests in order, at their arrival times (s from the start); returns the seconds taken.

    concurrency: requests in flight of a closed loop, where one is sent when another ends, whatever its arrival time.
    Due requests are submitted before a step is planned, as in the twin. A step begins when the last ends, or an idle
    engine sees a request. stop: called between steps; true ends the run. progress: receives ended requests and time.
    meanwhile: called while the device works, which then also records the last step. None: steps are recorded as they
    end.
    """
    begin = clock()
    coming = iter(requests)
    due = next(coming, None)
    ended = 0
    behind: list[Callable[[], object]] = []  # the last step's records, to be made

    def since() -> float:
        return clock() - begin

    def deliver(now: float) -> bool:
        nonlocal due, ended
        if stop():
            return False
        while due is not None and (
            due.arrival <= now if concurrency is None else engine.num_waiting + engine.num_running < concurrency
        ):
            ended += not engine.submit(due if concurrency is None else replace(due, arrival=now))
            due = next(coming, None)
        return True

    def wait(now: float) -> float | None:
        moments = [EMPTY_STEP] * engine.withheld
        if due is not None:
            moments.append(max(0.0, due.arrival - since()))
        if not moments:
            return None
        catch_up()
        sleep(min(moments))
        return max(now, since())

    def done(plan: StepPlan, outcome: StepOutcome, ended_rows: npt.NDArray[np.int32], now: float) -> None:
        nonlocal ended
        ended += len(ended_rows)
        if recorder is not None:
            behind.append(partial(recorder.record, engine.replica, plan, outcome, ended_rows))
        if progress is not None:
            behind.append(partial(progress, ended, now))
        if meanwhile is None:
            catch_up()

    def catch_up() -> None:
        while behind:
            behind.pop(0)()

    if meanwhile is not None:
        meanwhile.append(catch_up)
    try:
        loop.serve(engine, executor.step, deliver=deliver, wait=wait, on_step=done, clock=since, now=since())
    finally:
        catch_up()
        if meanwhile is not None:
            meanwhile.remove(catch_up)
    return since()
