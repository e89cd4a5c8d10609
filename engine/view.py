"""What policies from outside see of a replica: read-only, without true lengths, the same in Python and compiled.

Questions about a replica are asked with a `View`; questions about values keep their parameters, and their answers are
checked here.
"""

from dataclasses import dataclass, field
from functools import cache, cached_property
from numbers import Real
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from . import hooks
from .admission import queued
from .errors import PolicyError
from .jit import copied, rule
from .numba_parts import expecting, making_read_only, making_views, offers, opening_views, shows
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


@dataclass(frozen=True)
class View:
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
    _engine: tuple[Any, Any] = field(repr=False)  # replica and policy

    @property
    def oldest(self) -> float:
        """Arrival of the request that waits longest (s); now if none waits."""
        return float(min(self._queue.arrival, default=self.now))

    def waiting(self, i: int | None = None) -> RequestView:
        """The ith waiting request in the queue's order; without i all, as arrays, in plain Python only."""
        return _one(self._queue, i, "waiting")

    def running(self, i: int | None = None) -> RequestView:
        """The ith running request; without i as in `waiting`."""
        return _one(self._batch, i, "running")

    @cached_property
    def _queue(self) -> RequestView:
        replica, counters = self._engine[0], self._engine[0].counters
        places = (int(counters.queue_head) + np.arange(self.num_waiting)) % len(replica.queue)
        return requests_at(replica, replica.queue[places, 0], replica.queue[places, 1])

    @cached_property
    def _batch(self) -> RequestView:
        replica = self._engine[0]
        slots = replica.lists[RUNNING, : self.num_running]
        return requests_at(replica, replica.sequences["request"][slots], slots)


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
        requests.copy(), arrival, replica.counters.clock - arrival, rows["slo_class"][requests],
        np.where(np.isnan(deadline), np.inf, arrival + deadline), rows["priority"][requests],
        replica.asked.input_length[requests], replica.asked.estimate[requests],
        np.where(slots >= 0, replica.sequences["emitted"][slots], 0).astype(np.int64),
    )  # fmt: skip


def view_in_python(replica: Replica, policy: AnyPolicy) -> View:
    """A view of copies; replica: with single records (core.opened)."""
    counters: Any = replica.counters
    return View(
        float(counters.clock), int(counters.num_waiting), int(counters.num_running), int(counters.num_rows),
        int(counters.pages_held), int(replica.fixed.num_pages), int(counters.threshold), policy.fields.copy(),
        policy.record, (replica, policy),
    )  # fmt: skip


view_of = making_views(view_in_python)
inside = opening_views(lambda view: view._engine)

for _name, _read in {
    "now": lambda view: inside(view)[0].counters.clock,
    "num_waiting": lambda view: inside(view)[0].counters.num_waiting,
    "num_running": lambda view: inside(view)[0].counters.num_running,
    "num_rows": lambda view: inside(view)[0].counters.num_rows,
    "pages_held": lambda view: inside(view)[0].counters.pages_held,
    "num_pages": lambda view: inside(view)[0].fixed.num_pages,
    "threshold": lambda view: inside(view)[0].counters.threshold,
    "fields": lambda view: inside(view)[1].fields,
}.items():
    shows(_name, _read)


def _oldest(view: Any) -> Any:
    replica, counters = inside(view)[0], inside(view)[0].counters
    earliest = counters.clock
    for i in range(counters.num_waiting):
        earliest = min(earliest, replica.arrival[queued(replica, i)[0]])
    return earliest


def _waiting(view: Any, i: Any) -> Any:
    replica = inside(view)[0]
    if not 0 <= i < replica.counters.num_waiting:
        raise IndexError("waiting(i) beyond the queue")
    request, slot = queued(replica, i)
    return _request_at(replica, request, slot)


def _running(view: Any, i: Any) -> Any:
    replica = inside(view)[0]
    if not 0 <= i < replica.counters.num_running:
        raise IndexError("running(i) beyond the batch")
    slot = replica.lists[RUNNING, i]
    return _request_at(replica, replica.sequences[slot].request, slot)


@rule
def _request_at(replica: Replica, request: int, slot: int) -> RequestView:
    row, arrival = replica.requests[request], replica.arrival[request]
    return RequestView(
        request, arrival, replica.counters.clock - arrival, row.slo_class,
        np.inf if np.isnan(row.deadline) else arrival + row.deadline, row.priority,
        replica.asked.input_length[request], replica.asked.estimate[request],
        replica.sequences[slot].emitted if slot >= 0 else 0,
    )  # fmt: skip


shows("oldest", _oldest)
offers("waiting", _waiting)
offers("running", _running)


# ---- answers of rules from outside, in the engine's form -------------------------------------------------------------

OF_A_VIEW = frozenset({hooks.choose, hooks.threshold_now, hooks.holds_back})  # one parameter: the view
unwritable = making_read_only(read_only)


@rule
def inner(*arguments: Any) -> Any:
    """In a rule that wraps (`part.wraps`): the answer that it wraps, with the same parameters."""
    raise PolicyError("inner is called by a rule that wraps nothing")


answer: Any = None  # the rule from outside, in a form's copy
memory: Any = None  # the rule that answers `held`


@rule
def is_whole(number: Any) -> bool:
    """Whether an answer is a whole number."""
    return bool(number == int(number))


@rule
def three_whole(numbers: Any) -> bool:
    """Whether an answer is three whole numbers."""
    return len(numbers) == 3 and is_whole(numbers[0]) and is_whole(numbers[1]) and is_whole(numbers[2])


def _whole(number: Any) -> bool:
    return isinstance(number, Real | np.bool_) and float(number).is_integer()


# In Python an answer may be anything.
is_whole.in_python = _whole  # type: ignore[attr-defined]
three_whole.in_python = lambda numbers: (  # type: ignore[attr-defined]
    isinstance(numbers, tuple) and len(numbers) == 3 and all(map(_whole, numbers))
)


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


_is_a_chunk = expecting(PolicyError, "choose answers{}, expected 1 to{}")
_is_a_threshold = expecting(PolicyError, "threshold_now answers place{}, expected below{}")
_is_yes_or_no = expecting(PolicyError, "holds_back answers{}, expected 0 to{}")
_is_a_pass = expecting(PolicyError, "work answers{}, expected{} whole numbers: phase, positions, keys")
_is_open = expecting(PolicyError, "select marks position{}, which is cached or beyond the first{}")
_is_in_chunk = expecting(PolicyError, "select marks{} positions, more than the chunk of{}")
_keeps = expecting(PolicyError, "settle changes more than committed positions to cached ones: masks by{}, cached by{}")
_is_a_phase = expecting(PolicyError, "work answers phase{}, expected a phase of a pass, up to{}")
_is_computable = expecting(PolicyError, "work computes{} positions, expected 1 to the length{}")
_is_held = expecting(PolicyError, "work sees{} keys, more than computed and held:{}")
_has_rows = expecting(PolicyError, "head_rows answers{}, expected 0 to the step's tokens{}")
_has_tokens = expecting(PolicyError, "held answers{}, expected at least{}")

FORMS: dict[Any, Any] = {
    hooks.choose: _choose, hooks.threshold_now: _threshold_now, hooks.holds_back: _holds_back, hooks.select: _select,
    hooks.settle: _settle, hooks.work: _work, hooks.head_rows: _head_rows, hooks.held: _held,
}  # fmt: skip


@cache
def engine_form(question: Any, answer: Any, memory: Any) -> Any:
    """A rule from outside as the engine asks it; memory: the policy's answer to `held`."""
    return copied(FORMS[question], like=answer, answer=answer, memory=memory)


def _as_seen(view: Any) -> Any:
    replica, policy = inside(view)
    return answer(replica, policy)


@cache
def wrapping(question: Any, outer: Any, within: Any) -> Any:
    """A rule from outside that calls `inner`, which stands for the answer `within` in the engine's form."""
    form = copied(_as_seen, like=outer, answer=within) if question in OF_A_VIEW else within
    names = [name for name, value in outer.py_func.__globals__.items() if value is inner]
    return copied(outer, like=outer, **dict.fromkeys(names, form))
