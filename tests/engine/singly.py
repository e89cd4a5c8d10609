"""A run of an engine one step at a time: `schedule`, the step model, `commit`."""

from collections.abc import Callable

from dsim.engine.engine import Engine
from dsim.engine.journal import StepRecorder
from dsim.sim.step_model import StepModel
from dsim.traces import Trace


def run_singly(
    engine: Engine, model: StepModel, trace: Trace, recorder: StepRecorder,
    check: Callable[[Engine], None] = lambda engine: None,
) -> float:  # fmt: skip
    """Record a trace's steps; the time at which it has been served. check: what holds before and after each step."""
    now, submitted = 0.0, 0
    while True:
        while submitted < len(trace) and trace.arrival[submitted] <= now:
            engine.submit(trace.request(submitted))
            submitted += 1
        plan = engine.schedule(now)
        if plan is None and submitted == len(trace):
            recorder.flush()
            return now
        if plan is None:
            now = float(trace.arrival[submitted])
            continue
        check(engine)
        outcome = model.step(plan)
        now = plan.now + outcome.latency
        recorder.record(0, plan, outcome, engine.commit(outcome, now))
        check(engine)
