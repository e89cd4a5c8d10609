"""What policies from outside see of a replica: read-only, without true lengths, the same in Python and compiled.

Questions about a replica are asked with a `View`; questions about values keep their parameters, and their answers are
checked here.
"""

from collections.abc import Callable
from functools import cache
from numbers import Real
from typing import Any, NamedTuple
from zlib import crc32

import numba
import numpy as np
from numba.extending import overload_method

from . import hooks
from .admission import queued
from .errors import PolicyError, cut
from .jit import F, copied, inlined, plain, rule
from .state import CACHED, FULL, MASKED, PARTIAL, RUNNING, AnyPolicy, Replica, read_only


class RequestView(NamedTuple):
    """A request that waits or runs; arrays [requests] in `View.waiting()` and `View.running()`."""

    index: Any  # in the trace
    arrival: Any  # s
    age: Any  # s since arrival
    slo_class: Any  # class_of its name
    deadline: Any  # s, for the whole answer; infinity: none
    priority: Any  # lower first
    prompt: Any  # tokens
    estimate: Any  # answer tokens; the limit of a request that sets one
    emitted: Any  # tokens returned


def class_of(name: str) -> int:
    """The number of an SLO class in `RequestView.slo_class`; 0: no class."""
    return crc32(name.encode()) >> 1


class View(NamedTuple):
    """A replica before a step. Only `record` can be written."""

    now: float  # s
    num_waiting: int  # requests queued
    num_running: int  # requests admitted
    num_rows: int  # rows of the step being planned
    pages_held: int  # of KV
    num_pages: int  # ... in the pool
    threshold: int  # place of the last step's in `thresholds`
    fields: Any  # the policy's, as numbers; a word is its index in the Choice
    record: Any  # the policy's memory of the replica (Part.record)
    engine: Any  # the engine's own state, not for rules

    def waiting(self, i: int | None = None) -> RequestView:
        """The ith waiting request in the queue's order; without i all, as arrays, in plain Python only."""
        replica = self.engine[0]
        places = (int(replica.counters.queue_head) + np.arange(self.num_waiting)) % len(replica.queue)
        return _one(requests_at(replica, replica.queue[places, 0], replica.queue[places, 1]), i, "waiting")

    def running(self, i: int | None = None) -> RequestView:
        """The ith running request; without i as in `waiting`."""
        replica = self.engine[0]
        slots = replica.lists[RUNNING, : self.num_running]
        return _one(requests_at(replica, replica.sequences["request"][slots], slots), i, "running")


class Snapshot(View):
    """A view of a serving engine, for plain Python: `engine` has functions for `waiting` and `running`."""

    __slots__ = ()

    def waiting(self, i: int | None = None) -> RequestView:
        return _one(self.engine[0](), i, "waiting")

    def running(self, i: int | None = None) -> RequestView:
        return _one(self.engine[1](), i, "running")


def _one(requests: RequestView, i: int | None, kind: str) -> RequestView:
    if i is None:
        return requests
    if not 0 <= i < len(requests.index):
        raise IndexError(f"{kind}({i}) of {len(requests.index)} requests")
    return RequestView(*(column[i].item() for column in requests))


def requests_at(replica: Replica, requests: Any, slots: Any) -> RequestView:
    """Views of these requests, [requests]; slots: of their progress, or -1."""
    rows: Any = replica.requests
    arrival, deadline = replica.arrival[requests], rows["deadline"][requests]
    return RequestView(
        index=requests.astype(np.int64),
        arrival=arrival,
        age=replica.counters.clock - arrival,
        slo_class=rows["slo_class"][requests],
        deadline=np.where(np.isnan(deadline), np.inf, arrival + deadline),
        priority=rows["priority"][requests],
        prompt=replica.asked.input_length[requests],
        estimate=replica.asked.estimate[requests],
        emitted=np.where(slots >= 0, replica.sequences["emitted"][slots], 0).astype(np.int64),
    )


# ---- the same for compiled rules -------------------------------------------------------------------------------------


def in_python_as(function: Callable[..., Any]) -> Callable[[F], F]:
    """A decorator of a rule: this function stands for it in Python."""

    def decorate(compiled: F) -> F:
        compiled.in_python = function  # type: ignore[attr-defined]
        return compiled

    return decorate


@in_python_as(lambda fields: fields.copy())
@inlined
def shown(fields: Any) -> Any:
    """A policy's fields; in Python a copy (compiled rules are checked before they run)."""
    return fields


@in_python_as(read_only)
@inlined
def unwritable(array: Any) -> Any:
    """An array; read-only in Python, where each rule's first steps run."""
    return array


@inlined
def view_of(replica: Replica, policy: AnyPolicy) -> View:
    counters = replica.counters
    return View(
        now=float(counters.clock),
        num_waiting=int(counters.num_waiting),
        num_running=int(counters.num_running),
        num_rows=int(counters.num_rows),
        pages_held=int(counters.pages_held),
        num_pages=int(replica.fixed.num_pages),
        threshold=int(counters.threshold),
        fields=shown(policy.fields),
        record=policy.record,
        engine=(replica, policy),
    )


view_in_python = plain(view_of)  # replica: with single records (core.opened)


def _waiting(view, i):  # type: ignore[no-untyped-def]
    replica = view.engine[0]
    if not 0 <= i < view.num_waiting:
        raise IndexError("waiting(i) beyond the queue")
    request, slot = queued(replica, i)
    return _request_at(replica, request, slot)


def _running(view, i):  # type: ignore[no-untyped-def]
    replica = view.engine[0]
    if not 0 <= i < view.num_running:
        raise IndexError("running(i) beyond the batch")
    slot = replica.lists[RUNNING, i]
    return _request_at(replica, replica.sequences[slot].request, slot)


@rule
def _request_at(replica: Replica, request: int, slot: int) -> RequestView:
    row, arrival, deadline, emitted = replica.requests[request], replica.arrival[request], np.inf, 0
    if not np.isnan(row.deadline):
        deadline = arrival + row.deadline
    if slot >= 0:
        emitted = replica.sequences[slot].emitted
    return RequestView(
        index=request,
        arrival=arrival,
        age=replica.counters.clock - arrival,
        slo_class=row.slo_class,
        deadline=deadline,
        priority=row.priority,
        prompt=replica.asked.input_length[request],
        estimate=replica.asked.estimate[request],
        emitted=emitted,
    )


overload_method(numba.types.NamedTuple, "waiting", inline="always")(
    lambda view, i: _waiting if view.instance_class is View else None
)
overload_method(numba.types.NamedTuple, "running", inline="always")(
    lambda view, i: _running if view.instance_class is View else None
)


# ---- answers of rules from outside, in the engine's form -------------------------------------------------------------

OF_A_VIEW = frozenset({hooks.choose, hooks.threshold_now, hooks.holds_back})  # one parameter: the view


@rule
def inner(*arguments: Any) -> Any:
    """In a rule that wraps (`part.wraps`): the answer that it wraps, with the same parameters."""
    raise PolicyError("inner is called by a rule that wraps nothing")


answer: Any = None  # the rule from outside, in a form's copy
memory: Any = None  # the rule that answers `held`


def _whole(number: Any) -> bool:
    return isinstance(number, Real | np.bool_) and float(number).is_integer()


def _three_whole(numbers: Any) -> bool:
    return isinstance(numbers, tuple) and len(numbers) == 3 and all(map(_whole, numbers))


# In Python an answer may be anything.
@in_python_as(_whole)
@rule
def is_whole(number: Any) -> bool:
    return bool(number == int(number))


@in_python_as(_three_whole)
@rule
def three_whole(numbers: Any) -> bool:
    return len(numbers) == 3 and is_whole(numbers[0]) and is_whole(numbers[1]) and is_whole(numbers[2])


def expecting(text: str) -> Any:
    """A check of a condition and two numbers: raises `text` with the numbers, compiled code without them."""
    message = text.format("", "")

    def in_python(holds: bool, value: Any, limit: Any) -> None:
        if not holds:
            raise PolicyError(text.format(f" {cut(value)}", f" {cut(limit)}"))

    @in_python_as(in_python)
    @rule
    def check(holds: bool, value: Any, limit: Any) -> None:
        if not holds:
            raise PolicyError(message)

    return check


_is_a_chunk = expecting("choose answers{}, expected 1 to{}")
_is_a_threshold = expecting("threshold_now answers place{}, expected below{}")
_is_yes_or_no = expecting("holds_back answers{}, expected 0 to{}")
_is_a_pass = expecting("work answers{}, expected{} whole numbers: phase, positions, keys")
_is_open_or_not = expecting("opens answers{}, expected 0 to{}")
_is_open = expecting("select marks position{}, which is cached or beyond the first{}")
_is_in_chunk = expecting("select marks{} positions, more than the chunk of{}")
_keeps = expecting("settle changes more than committed positions to cached ones: masks by{}, cached by{}")
_is_a_phase = expecting("work answers phase{}, expected a phase of a pass, up to{}")
_is_computable = expecting("work computes{} positions, expected 1 to the length{}")
_is_held = expecting("work sees{} keys, more than computed and held:{}")
_has_rows = expecting("head_rows answers{}, expected 0 to the step's tokens{}")
_has_tokens = expecting("held answers{}, expected at least{}")


def _choose(replica: Replica, policy: AnyPolicy) -> Any:
    chunk = answer(view_of(replica, policy))
    _is_a_chunk(is_whole(chunk) and 1 <= chunk <= replica.fixed.width, chunk, replica.fixed.width)
    return int(chunk)


def _threshold_now(replica: Replica, policy: AnyPolicy) -> Any:
    place = answer(view_of(replica, policy))
    num = replica.fixed.num_thresholds
    _is_a_threshold(is_whole(place) and 0 <= place < num, place, num)
    return int(place)


def _holds_back(replica: Replica, policy: AnyPolicy) -> Any:
    waits = answer(view_of(replica, policy))
    _is_yes_or_no(is_whole(waits) and 0 <= waits <= 1, waits, 1)
    return bool(waits)


def _opens(status: Any, opened: int, block: int, fields: Any) -> Any:
    opened_next = answer(unwritable(status), opened, block, fields)
    _is_open_or_not(is_whole(opened_next) and 0 <= opened_next <= 1, opened_next, 1)
    return bool(opened_next)


def _select(status: Any, reach: int, chunk: int, fields: Any, window: Any) -> None:
    answer(unwritable(status), reach, chunk, fields, window)
    num = 0
    for k in range(len(window)):
        if window[k]:
            num += 1
            _is_open(k < reach and status[k] != CACHED, k, reach)
    _is_in_chunk(num <= chunk, num, chunk)


def _settle(status: Any, evaluations: Any, window: Any, block: int, fields: Any, prefill: bool) -> None:
    masks, final = 0, 0
    for k in range(len(status)):
        masks += status[k] == MASKED
        final += status[k] == CACHED
    answer(status, evaluations, unwritable(window), block, fields, prefill)
    for k in range(len(status)):
        masks -= status[k] == MASKED
        final -= status[k] == CACHED
    _keeps(masks == 0 and final <= 0, masks, final)


def _work(prompt: int, length: int, start: int, step: int, block_step: int, block: int, fields: Any) -> Any:
    one_pass = answer(prompt, length, start, step, block_step, block, fields)
    _is_a_pass(three_whole(one_pass), one_pass, 3)
    phase, computed, keys = one_pass
    visible = computed + memory(prompt, length, 1, fields)
    _is_a_phase(FULL <= phase <= PARTIAL, phase, PARTIAL)
    _is_computable(1 <= computed <= length, computed, length)
    _is_held(keys <= visible, keys, visible)
    return phase, computed, keys


def _head_rows(prompt: int, length: int, start: int, tokens: int, block: int, fields: Any) -> Any:
    rows = answer(prompt, length, start, tokens, block, fields)
    _has_rows(is_whole(rows) and 0 <= rows <= tokens, rows, tokens)
    return rows


def _held(prompt: int, length: int, state: int, fields: Any) -> Any:
    tokens = answer(prompt, length, state, fields)
    _has_tokens(is_whole(tokens) and tokens >= 0, tokens, 0)
    return tokens


FORMS: dict[Any, Any] = {
    hooks.choose: _choose,
    hooks.threshold_now: _threshold_now,
    hooks.holds_back: _holds_back,
    hooks.opens: _opens,
    hooks.select: _select,
    hooks.settle: _settle,
    hooks.work: _work,
    hooks.head_rows: _head_rows,
    hooks.held: _held,
}


@cache
def engine_form(question: Any, answer: Any, memory: Any) -> Any:
    """A rule from outside as the engine asks it; memory: the policy's answer to `held`."""
    return copied(FORMS[question], like=answer, answer=answer, memory=memory)


def _as_seen(view: Any) -> Any:
    replica, policy = view.engine
    return answer(replica, policy)


@cache
def wrapping(question: Any, outer: Any, within: Any) -> Any:
    """A rule from outside that calls `inner`, which stands for the answer `within` in the engine's form."""
    form = copied(_as_seen, like=outer, answer=within) if question in OF_A_VIEW else within
    names = [name for name, value in outer.py_func.__globals__.items() if value is inner]
    return copied(outer, like=outer, **dict.fromkeys(names, form))
