"""Replica steps: decide, plan, draw, price, commit, until an external event is due."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import hooks
from .admission import comes_by, drop_finished, enter, release_rows, submit
from .emission import account, begin, note_progress
from .errors import PolicyError
from .hooks import (
    NEEDED,
    commit_rows,
    decide,
    draw_rows,
    draws_of_step,
    give_back,
    leap,
    plan_prompts,
    plan_rows,
    prefill_over,
    rows_updated,
    select,
    step_over,
    threshold_now,
)
from .jit import (
    bind,
    called_by,
    copied,
    entry,
    fields_written,
    in_python,
    inlined,
    is_kept,
    is_ours,
    is_rule,
    parameters,
    rule,
    uncompiled,
)
from .journal import Journal, record_step
from .latency import price
from .numba_parts import JIT, NumbaError, save, saved
from .part import QUESTIONS, Wrapping
from .prefix import find_ahead, make_room, pin
from .route import least_loaded
from .state import ASK_AGAIN, NOTHING, PREFILL_STEP, AnyPolicy, Cost, Draws, Inbox, PolicyState, Replica, step_slots
from .view import FORMS, OF_A_VIEW, engine_form, wrapping

if TYPE_CHECKING:
    from .part import Part, Policy

LOG = logging.getLogger("dsim")

# Why `run` returns.
IDLE_NOW = 0  # nothing waits or runs, at counters.clock
IN_FLIGHT = 1  # the step in flight ends at or after the horizon, at counters.now + latency
FINISHED = 2  # requests finished, at clock
JOURNAL_FULL = 3  # no room for the step in flight
NO_SLOTS = 4  # a decision could admit more requests than there are slots
PAUSED = 5  # the given number of steps is done, at clock
ASKS = 6  # the discipline is to be asked, at clock
STALLED = 7  # steps or a row make no progress, at clock
NO_QUEUE = 9  # a queue has no room
REASONS = 16  # above all of them


# Compiling `run` takes about five seconds and makes steps a hundred times faster. A process first steps in Python for
# PATIENCE window positions (one to four seconds), unless the run has MANY_REQUESTS. A count, not a time, so that runs
# are the same on every machine.
PATIENCE = 500_000
MANY_REQUESTS = 500
A_FEW = 16  # steps between checks of the count
# For callers that step one by one: live runs measure host time, so all steps are compiled.
STEPS_PATIENCE = 0


class Span(NamedTuple):
    """How far a call of `run` goes."""

    now: float  # s
    horizon: float  # s; a step that ends then or later stays in flight
    limit: int  # steps; of `_serve`, also requests
    until_finish: bool  # return when a request finishes


class Group(NamedTuple):
    """Replicas of one setting side by side, for `_serve`."""

    states: Any  # numba_parts.states
    due: Any  # [replicas] when each runs again (s), infinity while idle
    places: Any  # of replicas that take requests
    figures: Any  # for route.least_loaded
    inbox: Inbox
    cursor: Any  # [1] requests taken from the inbox


# Questions that the engine's rules ask a policy.
PLACEHOLDERS = tuple(value for name, value in vars(hooks).items() if getattr(value, "__module__", "") == hooks.__name__)


@rule
def choose_rows(replica: Replica, policy: AnyPolicy) -> int:
    """Decide the next step and its rows: NOTHING, PREFILL_STEP or DECODE_STEP."""
    counters = replica.counters
    counters.num_preempted = 0
    counters.num_rows = 0
    return decide(replica, policy)


@rule
def plan(replica: Replica, policy: AnyPolicy, kind: int, now: float) -> None:
    """Plan the step of the chosen rows."""
    if kind == PREFILL_STEP:
        plan_prompts(replica, policy)
    else:
        plan_rows(replica, policy)
    begin(replica, kind, now)


@rule
def schedule(replica: Replica, policy: AnyPolicy, now: float) -> int:
    """Decide and plan the next step: NOTHING, PREFILL_STEP, DECODE_STEP or ASK_AGAIN."""
    kind = choose_rows(replica, policy)
    if kind != NOTHING and kind != ASK_AGAIN:
        plan(replica, policy, kind, now)
    return kind


@rule
def predict(replica: Replica, policy: AnyPolicy, draws: Draws, cost: Cost) -> None:
    """Predict the commits and latency (s) of the step in flight."""
    draw_rows(replica, policy, draws_of_step(replica, policy, draws))
    replica.counters.latency = price(replica, cost)


@rule
def commit(replica: Replica, policy: AnyPolicy, now: float) -> None:
    """Apply the outcome of the step in flight, which ends now; replica.lists[DONE] gets finished requests."""
    counters = replica.counters
    counters.num_freed = 0
    counters.num_done = 0
    committed = account(replica, now)
    commit_rows(replica, policy, now)
    for slot in step_slots(replica):
        sequence = replica.sequences[slot]
        if not sequence.prefilled and sequence.left == 0:
            sequence.prefilled = True
            counters.expected_tokens -= sequence.prompt
    note_progress(replica, committed + counters.num_done)
    if counters.kind == PREFILL_STEP:
        prefill_over(replica, policy)
    else:
        step_over(replica, policy)
    if counters.num_done > 0:
        drop_finished(replica)
    rows_updated(replica, policy)
    counters.kind = NOTHING
    counters.clock = now


@rule
def end_step(replica: Replica, policy: AnyPolicy, journal: Journal) -> bool:
    """Record and end the predicted step in flight; False, with nothing done, if the journal is full."""
    counters = replica.counters
    if not record_step(replica, policy, journal):
        return False
    commit(replica, policy, counters.now + counters.latency)
    if len(journal.steps) > 0:
        journal.steps[journal.filled[0].steps - 1].finished = counters.num_done
    return True


@rule
def run(replica: Replica, policy: AnyPolicy, draws: Draws, cost: Cost, journal: Journal, span: Span) -> int:
    """End the step in flight, then run predicted steps up to the one that ends at or after the horizon.

    draws: draw.Draws, or one per threshold of the policy. Bit for bit the same as repeated `schedule`, prediction and
    `commit`, each request of the inbox submitted at its time: before steps that end or begin then.
    """
    counters, horizon = replica.counters, span.horizon
    counters.clock = span.now
    for _ in range(span.limit):
        goes_on = counters.kind != NOTHING  # a step of an earlier call ends in any case
        if not goes_on:
            now = counters.clock
            enter(replica, now)
            if counters.num_free < min(counters.num_waiting, replica.fixed.max_batch):
                return NO_SLOTS
            if counters.num_waiting >= counters.ask_from and not counters.is_asked:
                return ASKS
            counters.is_asked = False
            kind = schedule(replica, policy, now)
            if kind == ASK_AGAIN:
                return ASKS
            if kind == NOTHING:
                if counters.num_waiting > 0 or counters.num_running > 0 or not comes_by(replica, horizon):
                    return IDLE_NOW
                counters.clock = replica.inbox.times[counters.entered]
                continue
            predict(replica, policy, draws, cost)
        end = counters.now + counters.latency
        goes_on = goes_on or end < horizon
        if not goes_on:
            end = horizon
        enter(replica, end)
        if not goes_on:
            return IN_FLIGHT
        if not end_step(replica, policy, journal):
            return JOURNAL_FULL
        if counters.stalled:
            return STALLED
        if counters.num_done > 0:
            if span.until_finish:
                return FINISHED
        elif len(journal.steps) == 0:
            leap(replica, policy, draws, cost, horizon)
    return PAUSED


@inlined
def opened(replica: Any) -> Replica:
    """The replica as rules take it, from arrays of records (state.Replica)."""
    return Replica(
        counters=replica.counters[0], fixed=replica.fixed[0], sequences=replica.sequences, status=replica.status,
        evaluations=replica.evaluations, window=replica.window, committed=replica.committed, retained=replica.retained,
        requests=replica.requests, asked=replica.asked, arrival=replica.arrival, inbox=replica.inbox,
        lists=replica.lists, queue=replica.queue, bins=replica.bins, counts=replica.counts, growth=replica.growth,
    )  # fmt: skip


@inlined
def opened_policy(policy: Any) -> AnyPolicy:
    """A policy's state as rules take it."""
    return PolicyState(
        fields=policy.fields[0], columns=policy.columns, record=policy.record[0], cost=policy.cost,
        cache=policy.cache, thresholds=policy.thresholds,
    )  # fmt: skip


# ---- entries for Python: take arrays of records ----------------------------------------------------------------------


called: Any = None  # the rule, in an entry's copy


@rule
def _entry(replica: Any, policy: Any, *arguments: Any) -> Any:
    return called(opened(replica), opened_policy(policy), *arguments)


@rule
def _run(replica: Any, policy: Any, draws: Any, cost: Any, journal: Any, span: Span) -> int:
    return run(opened(replica), opened_policy(policy), draws, cost, journal, span)


@rule
def _keep_state(states: Any, place: int, replica: Any, policy: Any) -> None:
    """Keep a replica's state for `_serve`."""
    save(states, place, (replica, policy))


@rule
def _run_due(group: Group, replica: Any, policy: Any, draws: Any, cost: Any, journal: Any, span: Span) -> int:
    """`run` each replica due by now or before the horizon; -1, or as `_serve` if one returned to Python."""
    due = group.due
    for place in range(len(due)):
        if due[place] < span.horizon or due[place] <= span.now:
            state, fields = saved(group.states, place, (replica, policy))
            opened_replica = opened(state)
            counters = opened_replica.counters
            stretch = Span(due[place], span.horizon, span.limit, False)
            reason = run(opened_replica, opened_policy(fields), draws, cost, journal, stretch)
            if reason == IN_FLIGHT:
                due[place] = counters.now + counters.latency
            else:
                due[place] = counters.clock
                if reason != IDLE_NOW or counters.num_waiting > 0 or counters.num_running > 0:
                    return place * REASONS + reason
                due[place] = np.inf
    return -1


@rule
def _serve(group: Group, replica: Any, policy: Any, draws: Any, cost: Any, journal: Any, span: Span) -> int:
    """Run all due replicas, sending each request of the inbox due by the horizon to a replica (`route.least_loaded`).

    replica, policy: any of them, for types. Returns -1, or place * REASONS + why of a replica that returned to Python.
    """
    due, inbox, cursor = group.due, group.inbox, group.cursor
    last = min(len(inbox.times), cursor[0] + span.limit)
    while True:  # `_run_due` is called in one place: each call of it is compiled separately
        arrives = cursor[0] < len(inbox.times) and inbox.times[cursor[0]] <= span.horizon
        if arrives and cursor[0] == last:
            return PAUSED  # reads as replica 0's: Python may stop the run, or call again
        time = inbox.times[cursor[0]] if arrives else span.horizon
        since = -np.inf if arrives else span.now
        code = _run_due(group, replica, policy, draws, cost, journal, Span(since, time, span.limit, False))
        if code >= 0 or not arrives:
            return code
        place = least_loaded(group.places, group.figures)
        chosen = opened(saved(group.states, place, (replica, policy))[0])
        if chosen.counters.num_waiting + len(chosen.sequences) + 1 > len(chosen.queue):
            return int(place * REASONS + NO_QUEUE)
        submit(chosen, inbox.requests[cursor[0]], inbox.fits[cursor[0]])
        if due[place] == np.inf:
            due[place] = time
        cursor[0] += 1


@rule
def _pin(replica: Replica, policy: AnyPolicy, pages: Any) -> None:
    pin(replica, policy, pages)
    make_room(replica, policy)


def _kind(value: Any) -> Any:
    """What numba's type of a value depends on."""
    if isinstance(value, np.ndarray):
        flags = value.flags
        return value.dtype, value.ndim, flags.c_contiguous, flags.writeable, flags.aligned
    return (type(value), *map(_kind, value)) if isinstance(value, tuple) else type(value)


class Core:
    """A policy's compiled step: the rules above with the policy's answers in place of the placeholders.

    Each rule compiles on first call: the twin needs only `run`, a live executor the others.
    """

    def __init__(self, answers: Mapping[Any, Any], kinds: str, name: str, checked: bool = False) -> None:
        self._answers = answers
        self._kinds = kinds
        self._name = name
        self._said = False
        self._made: dict[str, Any] = {}
        self._entries: dict[Any, Any] = {}
        self._kept: dict[str, bool] = {}  # rule -> whether on disk at first use
        self._checked = checked  # stays in Python
        self._spent = 0 if JIT else PATIENCE  # positions stepped in Python

    def is_young(self, num_requests: int = 0, name: str = "run") -> bool:
        """Whether a rule is not yet worth compiling; then use `run_young`, not `run`."""
        return (self._checked or num_requests < MANY_REQUESTS) and self._stays_in_python(name, PATIENCE)

    def run_young(self, replica: Any, policy: Any, draws: Any, cost: Any, journal: Any, span: Span) -> int:
        """`run` in plain Python at first, then compiled: bit for bit the same."""
        state = replica, policy, draws, cost, journal
        reason, remaining = PAUSED, span
        while remaining.limit > 0 and reason == PAUSED:
            reason = int(self._in_python("run")(*state, remaining._replace(limit=min(remaining.limit, A_FEW))))
            clock = float(replica.counters["clock"][0])
            remaining = remaining._replace(now=clock, limit=remaining.limit - A_FEW)
            if remaining.limit > 0 and reason == PAUSED and not self.is_young():
                return int(self.entry("run", *state, remaining)(*state, remaining))
        return reason

    def of_cache(self, name: str, num_requests: int) -> Any:
        """A prefix-cache rule (_OF_CACHE), compiled if a run of this size compiles `run`."""
        return self._in_python(name) if self.is_young(num_requests) else self._compiled(name)

    def __getattr__(self, name: str) -> Any:
        if name not in _RULES:
            raise AttributeError(name)
        if name != "run" and self._stays_in_python(name, STEPS_PATIENCE):
            return self._in_python(name)
        return self._compiled(name)

    def _compiled(self, name: str) -> Any:
        if name not in self.__dict__:
            # A live step must not wait for the interpreter's lock once it is over.
            dispatcher = bind(_RULES[name], self._answers, self._say, kinds=self._kinds, nogil=name == "run")
            setattr(self, name, self._reporting(dispatcher) if JIT else dispatcher)
        return self.__dict__[name]

    def _stays_in_python(self, name: str, patience: int) -> bool:
        """Whether Python has stepped fewer than `patience` positions and the rule is not on disk."""
        if self._checked or self._spent >= patience:
            return self._checked
        if name not in self._kept:
            self._kept[name] = is_kept(_RULES[name], self._answers, self._kinds)
        return not self._kept[name]

    def _in_python(self, name: str) -> Callable[..., Any]:
        if name not in self._made:
            function = in_python(_RULES[name], self._answers)

            @wraps(function)
            def counting(replica: Any, *arguments: Any) -> Any:
                before = int(replica.counters["num_steps"][0])
                try:
                    answer = function(replica, *arguments)
                except PolicyError as error:
                    raise PolicyError(f"policy {self._name}: {error}") from error
                steps = max(1, int(replica.counters["num_steps"][0]) - before)
                # Fixed costs of a step and a row, in positions.
                self._spent += steps * (
                    16 + int(replica.counters["num_running"][0]) * (8 + int(replica.fixed["width"][0]))
                )
                return answer

            self._made[name] = counting
        return self._made[name]

    def entry(self, name: str, *arguments: Any) -> Any:
        """A rule for these argument types alone (jit.entry)."""
        key = name, tuple(map(_kind, arguments))
        if key not in self._entries:
            dispatcher = self._compiled(name)
            code = self._reporting(entry)(getattr(dispatcher, "__wrapped__", dispatcher), *arguments)
            self._entries[key] = code if all(map(is_ours, self._answers.values())) else self._reporting(code)
        return self._entries[key]

    def _reporting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Raise errors of compiling, and of compiled rules from outside, as PolicyError."""

        @wraps(function)
        def compiled(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except (NumbaError, KeyError) as error:
                raise PolicyError(f"policy {self._name}: {uncompiled(error, self._answers.values())}") from error
            except (PolicyError, IndexError, ZeroDivisionError) as error:
                raise PolicyError(f"policy {self._name}: {error} (--check-rules says where and with what)") from error

        return compiled

    def _say(self) -> None:
        if not self._said:
            LOG.info("Compiling %s, once: about ten seconds", self._name)
        self._said = True


def _entries(**rules: Any) -> dict[str, Any]:
    return {name: copied(_entry, like=function, called=function) for name, function in rules.items()}


_ENTRIES: dict[str, Any] = _entries(
    schedule=schedule, commit=commit, choose_rows=choose_rows, plan=plan, predict=predict, end_step=end_step,
    let_go=give_back,
) | {"run": _run, "keep_state": _keep_state, "serve": _serve}  # fmt: skip
_OF_CACHE = _entries(pin=_pin, find_ahead=find_ahead)  # for prefix caches only
# The last: for policies that answer it.
_RULES = _ENTRIES | _OF_CACHE | _entries(choose_threshold=threshold_now)


def core_of(policy: "Policy", state: AnyPolicy | None = None) -> Core:
    """A policy's compiled step, for this state.

    PolicyError if its parts answer an unasked question or leave a required one open.
    """
    answers = answers_of(policy)
    arrays: Any = state or ()
    # Other fields mean other types, compiled apart, possibly by two processes at once.
    kinds = " ".join(str(array.dtype) for array in arrays[:3])
    checked = policy.checked and not all(map(is_ours, answers.values()))
    key = kinds, tuple(sorted(answers.items(), key=lambda item: item[0].__name__)), checked
    if key not in _CORES:
        _CORES[key] = Core(answers, kinds, policy.name, checked)
    return _CORES[key]


def questions_of(answers: Mapping[Any, Any]) -> frozenset[Any]:
    """Questions that a policy's step asks, given these answers: placeholders that its rules reach."""
    key = tuple(sorted(answers.items(), key=lambda item: item[0].__name__))
    if key not in _QUESTIONS:
        _QUESTIONS[key] = frozenset(PLACEHOLDERS) & frozenset(called_by(_ENTRIES.values(), answers))
    return _QUESTIONS[key]


def answers_of(policy: "Policy") -> dict[Any, Any]:
    """The rules that answer a policy's questions; PolicyError as in core_of."""
    _check_methods(policy)
    answers: dict[Any, Any] = {prefill_over: release_rows, **policy.rows.rules}
    answering: dict[Any, Any] = {}
    for component in policy.parts():
        name = f"policy {policy.name}: {type(component).__name__}"
        for placeholder, value in component.answers(policy).items():
            wraps_it = isinstance(value, Wrapping)
            answer = value.rule if isinstance(value, Wrapping) else value
            _check_answer(policy, name, placeholder, answer)
            other = answering.setdefault(placeholder, component)
            if other is not component and not wraps_it and not (is_ours(type(other)) and is_ours(type(component))):
                rivals = f"{type(other).__name__} and {type(component).__name__} both answer {placeholder.__name__}"
                raise PolicyError(f"policy {policy.name}: {rivals}, expected one of them, or wraps(rule) in the second")
            if wraps_it:
                within = _inherited(policy, component, placeholder) or answers.get(placeholder) or _default(placeholder)
                answer = wrapping(placeholder, answer, _formed(placeholder, within, answers))
            answering[placeholder] = component
            answers[placeholder] = answer
    answers = {placeholder: _formed(placeholder, answer, answers) for placeholder, answer in answers.items()}
    questions = questions_of(answers)
    for placeholder, component in answering.items():
        if placeholder not in questions:
            text = f"{type(component).__name__} answers {placeholder.__name__}, and this policy asks only: "
            raise PolicyError(f"policy {policy.name}: {text}{', '.join(sorted(_names(questions)))}")
    in_python = {select: policy.granularity.given, threshold_now: policy.unmasking.given}
    for placeholder, by_method in in_python.items():
        if by_method and (placeholder in answering or placeholder not in questions | {threshold_now}):
            raise PolicyError(f"policy {policy.name}: {placeholder.__name__} in Python is one answer too many")
    needed = {*NEEDED, *[threshold_now] * policy.unmasking.varies}
    for placeholder in needed & (questions | {threshold_now}):
        if placeholder not in answers and not in_python.get(placeholder):
            raise PolicyError(f"policy {policy.name}: no part answers {placeholder.__name__}, expected one that does")
    return answers


def _inherited(policy: "Policy", component: "Part", placeholder: Any) -> Any:
    """The rule of a class that the component extends; None: no such rule."""
    bases = [base for base in type(component).__mro__[1:] if hasattr(base, "answers")]
    answers = (base.answers(component, policy).get(placeholder) for base in bases)
    return next((answer for answer in answers if answer is not None and not isinstance(answer, Wrapping)), None)


@cache
def _default(placeholder: Any) -> Any:
    """A placeholder's own answer: the placeholder itself stands for the policy's."""
    return copied(placeholder, like=placeholder)


def _formed(placeholder: Any, answer: Any, answers: Mapping[Any, Any]) -> Any:
    """An answer as the engine asks it."""
    if answer is placeholder or is_ours(answer):
        return answer
    return engine_form(placeholder, answer, answers.get(hooks.held, hooks.held))


def _check_answer(policy: "Policy", name: str, placeholder: Any, answer: Any) -> None:
    """PolicyError for an answer that is no rule, or one from outside that asks for or writes the engine's records."""
    question = getattr(placeholder, "__name__", placeholder)
    if not is_rule(answer):
        raise PolicyError(f"{name} answers {question} with {answer!r}, expected a rule (dsim.policy.rule)")
    if is_ours(answer) and placeholder in PLACEHOLDERS:
        return
    if placeholder not in FORMS:
        raise PolicyError(
            f"{name} answers {question}, expected one of {', '.join(_names(FORMS))}, or a Discipline's in Python"
        )
    names, expected = parameters(answer), parameters(placeholder)
    if placeholder in OF_A_VIEW:
        expected = ["view"]
    if len(names) != len(expected):
        raise PolicyError(
            f"{name} answers {question} with {answer.__name__}({', '.join(names)}), expected {len(expected)}: "
            f"{', '.join(expected)}"
        )
    record_fields = {field for component in policy.parts() for field in component.record(policy)}
    for callee in (answer, *called_by([answer], {})):
        if not is_ours(callee) and (written := fields_written(callee) - record_fields):
            raise PolicyError(
                f"{name}: rule {callee.__name__} writes {', '.join(sorted(written))}, expected only fields of its "
                f"record: {', '.join(sorted(record_fields)) or 'none'}"
            )


def _check_methods(policy: "Policy") -> None:
    """PolicyError for a method from outside with a question's name that its part is not asked."""
    names = {*QUESTIONS, "unmask", *_names(FORMS)}
    for component in policy.parts():
        kinds = type(component).__mro__
        methods = {name for kind in kinds if not is_ours(kind) for name in vars(kind)}
        if unasked := (methods & names).difference(*(vars(kind) for kind in kinds if is_ours(kind))):
            raise PolicyError(
                f"policy {policy.name}: {type(component).__name__} has a method {min(unasked)}, which is never asked: "
                f"expected a rule in `answers`, select of a Granularity, threshold_now or unmask of an Unmasking, or "
                f"{', '.join(QUESTIONS)} of a Discipline"
            )


def _names(placeholders: Iterable[Any]) -> list[str]:
    return [placeholder.__name__ for placeholder in placeholders]


_QUESTIONS: dict[tuple[tuple[Any, Any], ...], frozenset[Any]] = {}
_CORES: dict[tuple[str, tuple[tuple[Any, Any], ...], bool], Core] = {}
