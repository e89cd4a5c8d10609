"""A replica's step, and a replica's life: decide, plan, draw, price, commit, until something from outside is due."""

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .admission import drop_finished, release
from .block import plan_prefill
from .emission import account, begin
from .hooks import commit_rows, decide, draw_rows, plan_rows, step_over
from .jit import bind, rule
from .journal import record_step
from .latency import price
from .state import NOTHING, PREFILL_STEP, ROWS

if TYPE_CHECKING:
    from .policy import Policy

# Why `run` returns.
IDLE_NOW = 0  # nothing waits and nothing runs, at w.c[0].clock
IN_FLIGHT = 1  # a step is in flight that ends at the horizon or beyond, at w.c[0].now + latency
FINISHED = 2  # requests have finished, at clock
JOURNAL_FULL = 3  # the step in flight has no room in the journal
NO_SLOTS = 4  # a decision could let in more requests than there are slots
PAUSED = 5  # as many steps as were asked for are done, at clock


@rule
def schedule(w: Any, x: Any, now: Any) -> int:
    """Decide on the next step and plan it; NOTHING, PREFILL_STEP or DECODE_STEP."""
    c = w.c[0]
    c.num_preempted = 0
    c.num_rows = 0
    kind = decide(w, x)
    if kind == NOTHING:
        return kind
    if kind == PREFILL_STEP:
        plan_prefill(w)
    else:
        plan_rows(w, x)
    begin(w, kind, now)
    return kind


@rule
def commit(w: Any, x: Any, now: Any) -> None:
    """Take in what came of the step in flight, which ends now; who finished is in w.lists[DONE]."""
    c = w.c[0]
    c.num_freed = 0
    c.num_done = 0
    account(w, now)
    commit_rows(w, x, now)
    if c.kind == PREFILL_STEP:
        for i in range(c.num_rows):
            q = w.q[w.lists[ROWS, i]]
            if not q.prefilled:
                q.prefilled = True
                c.outstanding_tokens -= q.prompt
        release(w, ROWS, c.num_rows)
    else:
        step_over(w, x)
    if c.num_done > 0:
        drop_finished(w)
    c.kind = NOTHING
    c.clock = now


@rule
def run(w: Any, x: Any, d: Any, k: Any, j: Any, now: Any, horizon: Any, most: Any, until_finish: Any) -> int:
    """End the step in flight, and run predicted steps up to the one that ends at the horizon or beyond.

    d: draw.Draws. k: latency.Cost. j: journal.Journal. most: steps. until_finish: return as soon as a request finishes.
    The same, bit for bit, as one `schedule`, prediction and `commit` after another.
    """
    c = w.c[0]
    c.clock = now
    for _ in range(most):
        if c.kind == NOTHING:
            now = c.clock
            if c.num_free < min(c.num_waiting, w.f[0].max_batch):
                return NO_SLOTS
            if schedule(w, x, now) == NOTHING:
                return IDLE_NOW
            draw_rows(w, x, d)
            c.latency = price(w, k)
            if not now + c.latency < horizon:
                return IN_FLIGHT
        if not record_step(w, j):
            return JOURNAL_FULL
        commit(w, x, c.now + c.latency)
        if len(j.steps) > 0:
            j.steps[j.at[0].count - 1].finished = c.num_done
        if until_finish and c.num_done > 0:
            return FINISHED
    return PAUSED


class Core(NamedTuple):
    """A policy's compiled step."""

    schedule: Any
    commit: Any
    run: Any


def core_of(policy: "Policy") -> Core:
    """The step of a policy: the rules above with the policy's answers in place of the placeholders."""
    answers: dict[Any, Any] = {}
    for part in policy.parts():
        answers.update(part.answers(policy))
    return _bound(tuple(sorted(answers.items(), key=lambda item: item[0].__name__)))


@cache
def _bound(answers: tuple[tuple[Any, Any], ...]) -> Core:
    given = dict(answers)
    return Core(bind(schedule, given), bind(commit, given), bind(run, given))
