"""Replays a journal: its outcomes, fed to a fresh engine, must give every plan exactly."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .engine import Engine
from .journal import EVICTED, STEP_COLUMNS, pack, unpack
from .part import Policy
from .request import requests_of
from .state import CANCELLED, COMPLETED, MASKED, REJECTED, UNFINISHED
from .step import Phase, StepOutcome, StepPlan, features_left, reached

Columns = Mapping[str, npt.NDArray[Any]]
OF_PLAN = ("step", "prefill", "batch", "chunk", "waiting", "running", "pages")
OF_FEATURES = ("tokens", "sum_q_kv", "sum_kv", "head_rows", "sampled_rows", "num_forwards")


def replay(
    engine: Engine,
    replica: int,
    requests: Columns,
    steps: Columns,
    lists: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]],
    *,
    on_step: Callable[[StepPlan, StepOutcome], None] = lambda plan, outcome: None,
) -> Iterator[str]:
    """Feed a journal's outcomes to a fresh engine; yields a line for each difference of plans.

    requests, steps: the journal's columns; lists: values and offsets of each list column. on_step: called with each
    plan and its outcome in the journal. Not for replicas of split fleets.
    """
    rows = np.flatnonzero(requests["replica"] == replica)
    rows = rows[np.argsort(requests["arrival"][rows], kind="stable")]  # a session's turn may come late
    early = Ends(engine.policy, requests)
    pending = list(requests_of(requests, rows))
    cancelled = _cancelled(requests, rows)
    submitted = 0

    for row in np.flatnonzero(steps["replica"] == replica):
        recorded = {name: values[row] for name, values in steps.items()}
        recorded |= {name: values[offsets[row] : offsets[row + 1]] for name, (values, offsets) in lists.items()}
        place = f"replica {replica}, step {int(recorded['step'])}"
        if recorded["submitted"] > len(pending):
            yield f"{place}: {recorded['submitted']} requests are submitted, the journal has {len(pending)}"
            return
        start, latency = float(recorded["start"]), float(recorded["latency"])
        while submitted < recorded["submitted"]:
            engine.submit(pending[submitted])
            submitted += 1
        while cancelled and cancelled[-1][0] <= start:
            yield from _cancel(engine, *cancelled.pop())
        plan = engine.schedule(start)
        if plan is None:
            yield f"{place}: the journal has a step, the engine has nothing to do"
            return
        differences = list(_differences(place, _planned(plan), recorded))
        if differences:
            yield from differences
            return
        n, width = plan.window.shape
        committed = unpack(recorded["commits"].reshape(n, -1), width)
        evicted = unpack(recorded["evictions"].reshape(n, -1), width)
        masked = plan.window & (plan.status == MASKED)
        if (evicted & ~masked).any() or (evicted.any() and plan.evicting is None):
            yield f"{place}: evictions {recorded['evictions'].tolist()} are not all of masks that may be evicted"
            return
        if engine.policy.rows.commits == "masks" and (committed & ~(masked & ~evicted)).any():
            yield f"{place}: commits {recorded['commits'].tolist()} are not all of computed masks"
            return
        retained, late = None, plan.features
        if plan.evicting is not None:
            retained = plan.window & ~evicted
            late = features_left(plan, retained)
        outcome = StepOutcome(latency, committed, retained=retained, ends=early.of(plan, committed))
        on_step(plan, outcome)
        done = engine.commit(outcome, start + latency)
        results = {
            "committed": committed.sum(),
            "finished": len(done),
            "preempted": len(plan.preempted),
            **{column: getattr(plan.features, name) - getattr(late, name) for name, column in EVICTED.items()},
        }
        yield from _differences(place, results, recorded)
    # Requests rejected or cancelled after the last step are in no step.
    for request, row in zip(pending[submitted:], rows[submitted:], strict=True):
        if requests["status"][row] in (REJECTED, CANCELLED):
            engine.submit(request)
    for time, index in reversed(cancelled):
        yield from _cancel(engine, time, index)
    if (requests["status"][rows] != UNFINISHED).all() and not engine.idle:
        yield f"replica {replica}: the journal ends, the engine has more steps to run"
    for row in rows:
        request = requests["request"][row]
        served = {name: engine.table[name][request] for name in ("status", "finish", "num_tokens")}
        yield from _differences(f"request {request}", served, {name: requests[name][row] for name in served})


def _planned(plan: StepPlan) -> dict[str, Any]:
    """The journal's columns that a plan fixes; the others hold the outcome."""
    columns = plan.features._asdict() | {name: getattr(plan, name) for name in STEP_COLUMNS if hasattr(plan, name)}
    return {
        **{name: columns[name] for name in (*OF_PLAN, *OF_FEATURES)},
        "evicting": plan.evicting is not None,
        "requests": plan.requests,
        "phases": plan.phases,
        "num_tokens": plan.num_tokens,
        "window": pack(plan.window).reshape(-1),
    }


def _differences(place: str, values: Mapping[str, Any], recorded: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if not np.array_equal(value, recorded[name], equal_nan=True):
            yield f"{place}: {name} is {value}, the journal has {recorded[name]}"


def _cancelled(requests: Columns, served: npt.NDArray[np.int64]) -> list[tuple[float, int]]:
    """Cancellation times of a replica's requests, and the requests, the last first."""
    rows = served[requests["status"][served] == CANCELLED]
    return sorted(zip(requests["finish"][rows].tolist(), requests["request"][rows].tolist(), strict=True), reverse=True)


def _cancel(engine: Engine, time: float, request: int) -> Iterator[str]:
    if not engine.cancel(request, time):
        yield f"request {request}: the journal has it cancelled at {time:g} s, the engine has it neither wait nor run"


class Ends:
    """Where a journal's requests ended at an EOS, before all the tokens that they asked for."""

    def __init__(self, policy: Policy, requests: Columns) -> None:
        self._policy = policy
        size = int(requests["request"].max(initial=-1)) + 1
        self._ends = np.full(size, np.iinfo(np.int32).max, np.int32)
        early = (requests["status"] == COMPLETED) & (requests["num_tokens"] < requests["output_length"])
        if policy.rows.commits == "tokens":  # its first token replaces an empty prompt
            early &= requests["input_length"] > 0
        self._ends[requests["request"][early]] = (requests["input_length"] + requests["num_tokens"])[early]
        self._any = bool(early.any())

    def of(self, plan: StepPlan, committed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32] | None:
        """StepOutcome.ends of a plan: an EOS counts once all before it is known."""
        if not self._any:
            return None
        ends = self._ends[plan.requests]
        complete = (reached(self._policy, plan, committed) >= ends) & (plan.phases != Phase.IDLE)
        return np.where(complete, np.minimum(ends, plan.end), plan.end)
