"""The keystone: a journal fed to a fresh engine must reproduce every plan exactly."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .engine import Engine
from .journal import STEP_COLUMNS, pack, unpack
from .part import Policy
from .request import requests_of
from .state import CANCELLED, COMPLETED, MASKED, REJECTED, UNFINISHED
from .step import Phase, StepOutcome, StepPlan, features_left, reached

Columns = Mapping[str, npt.NDArray[Any]]
# What a plan fixes; the other columns say what came of it.
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
    """Feed a journal's outcomes to a fresh engine; yields one line for each difference between its plans and theirs.

    `requests` and `steps` hold the journal's columns; `lists` each list column's values and offsets. `on_step` hears
    of each plan and of what the journal says came of it.
    """
    moves = Moved(engine, replica, requests)
    requests = moves.requests
    mine = np.flatnonzero((requests["replica"] == replica) & (requests.get("turn", requests["replica"]) >= 0))
    # A session's turn may come late.
    mine = mine[np.argsort(requests["turn" if "turn" in requests else "arrival"][mine], kind="stable")]
    early = Ends(engine.policy, requests)
    coming = list(requests_of(requests, mine))
    gone = _cancelled(requests, mine)
    submitted = 0
    for row in np.flatnonzero(steps["replica"] == replica):
        where = f"replica {replica}, step {int(steps['step'][row])}"
        if steps["submitted"][row] > len(coming):
            yield f"{where}: {steps['submitted'][row]} requests are submitted, the journal has {len(coming)}"
            return
        while submitted < steps["submitted"][row]:
            engine.submit(coming[submitted])
            submitted += 1
        start, latency = float(steps["start"][row]), float(steps["latency"][row])
        while gone and gone[-1][0] <= start:
            yield from _cancel(engine, *gone.pop())
        moves.before(int(steps["step"][row]))
        plan = engine.schedule(start)
        if plan is None:
            yield f"{where}: the journal has a step, the engine has nothing to do"
            return
        planned = _columns(plan)
        for name in PLANNED:
            if planned[name] != steps[name][row]:
                yield f"{where}: {name} is {planned[name]}, the journal has {steps[name][row]}"
        theirs = {name: values[offsets[row] : offsets[row + 1]] for name, (values, offsets) in lists.items()}
        ours: dict[str, npt.NDArray[Any]] = {
            "requests": plan.requests,
            "phases": plan.phases,
            "num_tokens": plan.num_tokens,
            "window": pack(plan.window).reshape(-1),
        }
        for name, values in ours.items():
            if not np.array_equal(values, theirs[name]):
                yield f"{where}: {name} are {values.tolist()}, the journal has {theirs[name].tolist()}"
                return
        n, width = plan.window.shape
        committed = unpack(theirs["commits"].reshape(n, -1), width)
        evicted = unpack(theirs["evictions"].reshape(n, -1), width)
        masked = plan.window & (plan.status == MASKED)
        if (evicted & ~masked).any() or (evicted.any() and plan.evicting is None):
            yield f"{where}: evictions {theirs['evictions'].tolist()} are not all of masks that may be evicted"
            return
        if engine.policy.rows.commits == "masks" and (committed & ~(masked & ~evicted)).any():
            yield f"{where}: commits {theirs['commits'].tolist()} are not all of computed masks"
            return
        retained = None if plan.evicting is None else plan.window & ~evicted
        left = plan.features if retained is None else features_left(plan, retained)
        outcome = StepOutcome(latency, committed, retained=retained, ends=early.of(plan, committed))
        on_step(plan, outcome)
        done = engine.commit(outcome, start + latency)
        moves.ended(done)
        came = {
            "committed": committed.sum(), "finished": len(done), "preempted": len(plan.preempted),
            "evicted": evicted.sum(), "evicted_q_kv": plan.features.sum_q_kv - left.sum_q_kv,
            "evicted_kv": plan.features.sum_kv - left.sum_kv,
            "evicted_sampled": plan.features.sampled_rows - left.sampled_rows,
        }  # fmt: skip
        for name, value in came.items():
            if value != steps[name][row]:
                yield f"{where}: {name} is {value}, the journal has {steps[name][row]}"
    # Requests rejected or cancelled after the last step appear in no step.
    for request, i in zip(coming[submitted:], mine[submitted:], strict=True):
        if requests["status"][i] in (REJECTED, CANCELLED):
            engine.submit(request)
    for when, index in reversed(gone):
        yield from _cancel(engine, when, index)
    over = (requests["status"][mine] != UNFINISHED).all()
    if over and not engine.idle:
        yield f"replica {replica}: the journal ends, the engine has more steps to run"
    for name in ("status", "finish", "num_tokens"):
        ours_now, recorded = engine.table[name][requests["request"][mine]], requests[name][mine]
        for i in np.flatnonzero(~((ours_now == recorded) | ((ours_now != ours_now) & (recorded != recorded)))):
            yield f"request {mine[i]}: {name} is {ours_now[i]}, the journal has {recorded[i]}"


def _cancelled(requests: Columns, mine: npt.NDArray[np.int64]) -> list[tuple[float, int]]:
    """When a replica's requests were cancelled, and which, the last first."""
    rows = mine[requests["status"][mine] == CANCELLED]
    return sorted(zip(requests["finish"][rows].tolist(), requests["request"][rows].tolist(), strict=True), reverse=True)


def _cancel(engine: Engine, when: float, request: int) -> Iterator[str]:
    if not engine.cancel(request, when):
        yield f"request {request}: the journal has it cancelled at {when:g} s, the engine has it neither wait nor run"


class Moved:
    """The pages that a replica held for requests that it sent elsewhere, or that were to come (MOVE_COLUMNS).

    requests: the columns as the replica had them: a prefill that its request left with is a request for no tokens.
    """

    def __init__(self, engine: Engine, replica: int, requests: Columns) -> None:
        self._engine, self.requests = engine, requests
        self._held: dict[int, int] = {}  # by request, from the end of its prefill
        self._changes: list[tuple[int, int, int]] = []  # step, request and pages reserved, or less than 0: given back
        if "prefill_replica" not in requests:
            return
        index = requests["request"].tolist()
        mine = requests["prefill_replica"] == replica
        if mine.any():
            self.requests = _prefills(requests)
            self._held = {index[i]: int(requests["held"][i]) for i in np.flatnonzero(mine & (requests["held"] > 0))}
            step, pages = requests["released_step"], -requests["held"]
        else:
            mine = requests["replica"] == replica
            step, pages = requests["reserved_step"], requests["reserved"]
        rows = np.flatnonzero(mine & (step >= 0)).tolist()
        self._changes = sorted(((int(step[i]), index[i], int(pages[i])) for i in rows), reverse=True)

    def before(self, step: int) -> None:
        """Change what is held before a step is planned."""
        while self._changes and self._changes[-1][0] <= step:
            _, request, pages = self._changes.pop()
            if pages > 0:
                self._engine.reserve(request, pages)
            else:
                self._engine.keep(pages)

    def ended(self, done: npt.NDArray[np.int32]) -> None:
        """Hold the pages of prefills that have ended."""
        for request in done.tolist():
            self._engine.keep(self._held.get(request, 0))


def _prefills(requests: Columns) -> Columns:
    """The columns of requests as a prefill pool had them: of no tokens."""
    none = np.zeros(len(requests["request"]), np.int32)
    finish = requests["prefill_finish"]
    return {
        **requests,
        **dict.fromkeys(("output_length", "max_tokens", "estimate", "canvas_length", "num_tokens", "arrived"), none),
        "input_length": requests["prefill_tokens"], "replica": requests["prefill_replica"],
        "turn": requests["prefill_turn"], "limited": none.astype(np.bool_), "finish": finish,
        "status": np.where(np.isnan(finish), UNFINISHED, COMPLETED),
    }  # fmt: skip


class Ends:
    """Where a journal's requests ended at an EOS, before they had all the tokens that they asked for."""

    def __init__(self, policy: Policy, requests: Columns) -> None:
        self._policy = policy
        size = int(requests["request"].max(initial=-1)) + 1
        self._at = np.full(size, np.iinfo(np.int32).max, np.int32)
        early = (requests["status"] == COMPLETED) & (requests["num_tokens"] < requests["output_length"])
        if policy.rows.commits == "tokens":  # its first token takes the place of a prompt of none
            early &= requests["input_length"] > 0
        self._at[requests["request"][early]] = (requests["input_length"] + requests["num_tokens"])[early]
        self._any = bool(early.any())

    def of(self, plan: StepPlan, committed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32] | None:
        """StepOutcome.ends of a plan: an EOS counts as soon as all before it is known."""
        if not self._any:
            return None
        at = self._at[plan.requests]
        found = (reached(self._policy, plan, committed) >= at) & (plan.phases != Phase.IDLE)
        return np.where(found, np.minimum(at, plan.end), plan.end)


def _columns(plan: StepPlan) -> dict[str, Any]:
    values = plan.features._asdict() | {name: getattr(plan, name) for name in STEP_COLUMNS if hasattr(plan, name)}
    values["evicting"] = plan.evicting is not None
    return {name: values[name] for name in PLANNED}
