"""Replays a journal: its outcomes, fed to a fresh engine, must give every plan exactly."""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .engine import Engine
from .journal import STEP_COLUMNS, pack, unpack
from .part import Policy
from .request import requests_of
from .state import CANCELLED, COMPLETED, MASKED, REJECTED, UNFINISHED
from .step import Phase, StepOutcome, StepPlan, features_left, reached

Columns = Mapping[str, npt.NDArray[Any]]
# Columns that the plan fixes; the others hold the outcome.
PLANNED = (
    "step", "prefill", "batch", "chunk", "tokens", "sum_q_kv", "sum_kv", "head_rows", "sampled_rows", "num_forwards",
    "waiting", "running", "pages", "evicting",
)  # fmt: skip


def replay(
    engine: Engine,
    replica: int,
    requests: Columns,
    steps: Columns,
    lists: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]],
    on_step: Callable[[StepPlan, StepOutcome], None] = lambda plan, outcome: None,
) -> Iterator[str]:
    """Feed a journal's outcomes to a fresh engine; yields a line for each difference of plans.

    requests, steps: the journal's columns; lists: values and offsets of each list column. on_step: called with each
    plan and its outcome in the journal. With MOVE_COLUMNS it also holds pages for requests elsewhere.
    """
    moves = Moved(engine, replica, requests)
    requests = moves.requests
    rows = np.flatnonzero((requests["replica"] == replica) & (requests.get("turn", requests["replica"]) >= 0))
    # A session's turn may come late.
    rows = rows[np.argsort(requests["turn" if "turn" in requests else "arrival"][rows], kind="stable")]
    early = Ends(engine.policy, requests)
    pending = list(requests_of(requests, rows))
    cancelled = _cancelled(requests, rows)
    submitted = 0

    for row in np.flatnonzero(steps["replica"] == replica):
        place = f"replica {replica}, step {int(steps['step'][row])}"
        if steps["submitted"][row] > len(pending):
            yield f"{place}: {steps['submitted'][row]} requests are submitted, the journal has {len(pending)}"
            return
        start, latency = float(steps["start"][row]), float(steps["latency"][row])
        for until in moves.asked_in_vain(int(steps["step"][row]), start):
            while submitted < len(pending) and moves.submitted[rows[submitted]] <= until:
                engine.submit(pending[submitted])
                submitted += 1
            if engine.schedule(until) is not None:
                yield f"{place}: it begins at {start:g} s, the engine has something to do at {until:g} s"
                return
        while submitted < steps["submitted"][row]:
            engine.submit(pending[submitted])
            submitted += 1
        while cancelled and cancelled[-1][0] <= start:
            yield from _cancel(engine, *cancelled.pop())
        plan = engine.schedule(start)
        if plan is None:
            yield f"{place}: the journal has a step, the engine has nothing to do"
            return
        planned = _columns(plan)
        for name in PLANNED:
            if planned[name] != steps[name][row]:
                yield f"{place}: {name} is {planned[name]}, the journal has {steps[name][row]}"
        logged = {name: values[offsets[row] : offsets[row + 1]] for name, (values, offsets) in lists.items()}
        planned_lists: dict[str, npt.NDArray[Any]] = {
            "requests": plan.requests,
            "phases": plan.phases,
            "num_tokens": plan.num_tokens,
            "window": pack(plan.window).reshape(-1),
        }
        for name, values in planned_lists.items():
            if not np.array_equal(values, logged[name]):
                yield f"{place}: {name} are {values.tolist()}, the journal has {logged[name].tolist()}"
                return
        n, width = plan.window.shape
        committed = unpack(logged["commits"].reshape(n, -1), width)
        evicted = unpack(logged["evictions"].reshape(n, -1), width)
        masked = plan.window & (plan.status == MASKED)
        if (evicted & ~masked).any() or (evicted.any() and plan.evicting is None):
            yield f"{place}: evictions {logged['evictions'].tolist()} are not all of masks that may be evicted"
            return
        if engine.policy.rows.commits == "masks" and (committed & ~(masked & ~evicted)).any():
            yield f"{place}: commits {logged['commits'].tolist()} are not all of computed masks"
            return
        retained = None if plan.evicting is None else plan.window & ~evicted
        late = plan.features if retained is None else features_left(plan, retained)
        outcome = StepOutcome(latency, committed, retained=retained, ends=early.of(plan, committed))
        on_step(plan, outcome)
        moves.change_in_step(int(steps["step"][row]))
        done = engine.commit(outcome, start + latency)
        moves.ended(done, start + latency)
        came = {
            "committed": committed.sum(), "finished": len(done), "preempted": len(plan.preempted),
            "evicted": evicted.sum(), "evicted_q_kv": plan.features.sum_q_kv - late.sum_q_kv,
            "evicted_kv": plan.features.sum_kv - late.sum_kv,
            "evicted_sampled": plan.features.sampled_rows - late.sampled_rows,
        }  # fmt: skip
        for name, value in came.items():
            if value != steps[name][row]:
                yield f"{place}: {name} is {value}, the journal has {steps[name][row]}"
    moves.finish()
    # Requests rejected or cancelled after the last step are in no step.
    for request, row in zip(pending[submitted:], rows[submitted:], strict=True):
        if requests["status"][row] in (REJECTED, CANCELLED):
            engine.submit(request)
    for time, index in reversed(cancelled):
        yield from _cancel(engine, time, index)
    if (requests["status"][rows] != UNFINISHED).all() and not engine.idle:
        yield f"replica {replica}: the journal ends, the engine has more steps to run"
    for name in ("status", "finish", "num_tokens"):
        served, recorded = engine.table[name][requests["request"][rows]], requests[name][rows]
        for k in np.flatnonzero(~((served == recorded) | ((served != served) & (recorded != recorded)))):
            yield f"request {requests['request'][rows[k]]}: {name} is {served[k]}, the journal has {recorded[k]}"


def _cancelled(requests: Columns, served: npt.NDArray[np.int64]) -> list[tuple[float, int]]:
    """Cancellation times of a replica's requests, and the requests, the last first."""
    rows = served[requests["status"][served] == CANCELLED]
    return sorted(zip(requests["finish"][rows].tolist(), requests["request"][rows].tolist(), strict=True), reverse=True)


def _cancel(engine: Engine, time: float, request: int) -> Iterator[str]:
    if not engine.cancel(request, time):
        yield f"request {request}: the journal has it cancelled at {time:g} s, the engine has it neither wait nor run"


class _Change(NamedTuple):
    """A change of the pages held for requests elsewhere, in the order of events."""

    step: int  # steps planned before
    time: float  # s
    at_once: bool  # as that step ended
    turn: int
    in_step: bool  # while the last of these steps ran
    request: int
    pages: int  # below 0: given back
    prompt: int
    tokens: int  # that were to come with it


class Moved:
    """Pages that a replica held for requests that had left, or were to come (MOVE_COLUMNS).

    requests: columns as the replica had them; a prefill that its request left with asks for no tokens. submitted: when
    each was handed over.
    """

    def __init__(self, engine: Engine, replica: int, requests: Columns) -> None:
        self._engine, self.requests = engine, requests
        self._kept: dict[int, int] = {}  # a request's pages, from the end of its prefill
        self._changes: list[_Change] = []  # the last first
        self._any = "prefill_replica" in requests
        self._end = 0.0  # s, of the last step
        self._decodes = False
        if not self._any:
            return
        prefilled = requests["prefill_replica"] == replica
        changes: list[_Change] = []
        never = np.zeros(len(prefilled), np.bool_)

        def change(name: str, time: str, pages: npt.NDArray[Any], at_once: npt.NDArray[np.bool_] = never) -> None:
            turn, in_step = (
                requests.get(f"{name}_{column}", default)
                for column, default in (("turn", requests["request"]), ("in_step", never))
            )
            columns = (
                requests[f"{name}_step"], requests[time], at_once, turn, in_step, requests["request"], pages,
                requests["input_length"], requests["prefill_tokens"],
            )  # fmt: skip
            indices = np.flatnonzero(prefilled & (requests[f"{name}_step"] >= 0)).tolist()
            changes.extend(_Change(*(column[i].item() for column in columns)) for i in indices)

        if prefilled.any():
            self._kept = dict(
                zip(requests["request"][prefilled].tolist(), requests["pages_kept"][prefilled].tolist(), strict=True)
            )
            # Released as the step ended that the prefill ended with.
            at_once = requests["released"] == requests["prefill_finish"]
            change("released", "released", -requests["pages_kept"], at_once)
            self.requests = _prefills(requests)
        else:
            prefilled, self._decodes = requests["replica"] == replica, True
            change("reserved", "reserved", requests["pages_reserved"])
        self._changes = sorted(changes, reverse=True)
        self.submitted = self.requests["submitted"]
        rows = np.flatnonzero((self.requests["replica"] == replica) & (self.requests["turn"] >= 0))
        self._brought = np.sort(self.submitted[rows])
        self._with_pages = np.sort(self.submitted[rows][self.requests["arrived"][rows] > 0])

    def asked_in_vain(self, step: int, start: float) -> Iterator[float]:
        """Times before `start` at which the engine was asked for this step in vain.

        It is asked as a step ends, as a request comes while it is idle, and, if requests wait for pages of absent ones,
        as these are given back. The held pages change first.
        """
        if not self._any:
            return
        time = self._end
        while True:
            waits = self._change(step, time, at_once=time > self._end)
            if time >= start and not waits:
                return
            yield time
            if waits and time >= start:
                self._change(step, time, at_once=True)
                return
            wakes = self._with_pages if self._engine.blocked else self._brought
            releases = [change.time for change in self._changes if change.pages < 0 and change.time > time]
            i = int(np.searchsorted(wakes, time, side="right"))
            time = min([start, *wakes[i : i + 1].tolist(), *releases])
            if waits:
                self._change(step, self._end, at_once=True)

    def _change(self, step: int, time: float, at_once: bool) -> bool:
        """Apply changes up to a time before a step is planned; True if some at that time remain."""
        deferred = []
        while self._changes and self._changes[-1][:2] <= (step, time):
            change = self._changes.pop()
            if change.at_once and not at_once:
                deferred.append(change)
            else:
                self._make(change)
        self._changes += reversed(deferred)
        return bool(deferred)

    def _make(self, change: _Change) -> None:
        engine = self._engine
        if self._decodes:
            engine.reserve(change.request, change.prompt, change.tokens)
        else:
            engine.keep(change.pages)

    def change_in_step(self, step: int) -> None:
        """Apply changes made while a step ran, before its commit changes the prefix cache."""
        while self._changes and self._changes[-1].step == step + 1 and self._changes[-1].in_step:
            self._make(self._changes.pop())

    def ended(self, done: npt.NDArray[np.int32], now: float) -> None:
        """Keep the pages of prefills that ended with a step."""
        self._end = now
        for request in done.tolist():
            self._engine.keep(self._kept.get(request, 0))

    def finish(self) -> None:
        self._change(sys.maxsize, np.inf, at_once=True)


def _prefills(requests: Columns) -> Columns:
    """Requests as a prefill pool had them: of no tokens."""
    none = np.zeros(len(requests["request"]), np.int32)
    without = ("output_length", "max_tokens", "estimate", "num_tokens", "arrived")
    finish = requests["prefill_finish"]
    return {
        **requests,
        **dict.fromkeys(without, none),
        "input_length": requests["prefill_tokens"], "replica": requests["prefill_replica"],
        "turn": requests["prefill_turn"], "submitted": requests["prefill_submitted"],
        "limited": none.astype(np.bool_), "finish": finish,
        "status": np.where(np.isnan(finish), UNFINISHED, COMPLETED),
    }  # fmt: skip


class Ends:
    """Where a journal's requests ended at an EOS, before all the tokens that they asked for."""

    def __init__(self, policy: Policy, requests: Columns) -> None:
        self._policy = policy
        size = int(requests["request"].max(initial=-1)) + 1
        self._at = np.full(size, np.iinfo(np.int32).max, np.int32)
        early = (requests["status"] == COMPLETED) & (requests["num_tokens"] < requests["output_length"])
        if policy.rows.commits == "tokens":  # its first token replaces an empty prompt
            early &= requests["input_length"] > 0
        self._at[requests["request"][early]] = (requests["input_length"] + requests["num_tokens"])[early]
        self._any = bool(early.any())

    def of(self, plan: StepPlan, committed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32] | None:
        """StepOutcome.ends of a plan: an EOS counts once all before it is known."""
        if not self._any:
            return None
        ends = self._at[plan.requests]
        complete = (reached(self._policy, plan, committed) >= ends) & (plan.phases != Phase.IDLE)
        return np.where(complete, np.minimum(ends, plan.end), plan.end)


def _columns(plan: StepPlan) -> dict[str, Any]:
    values = plan.features._asdict() | {name: getattr(plan, name) for name in STEP_COLUMNS if hasattr(plan, name)}
    values["evicting"] = plan.evicting is not None
    return {name: values[name] for name in PLANNED}
