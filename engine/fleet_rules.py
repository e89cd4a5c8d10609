"""What rules of deciders and scalers from outside answer, and the shipped rules that ask them."""

from typing import Any

import numpy.typing as npt

from .jit import rule, truth, whole
from .records import F8, I8, Record, Table


class ReplicaFigures(Record):
    """A replica as a decider's rule sees it."""

    replica: I8  # its number
    num_waiting: I8  # requests in its queue or on their way to it
    num_running: I8
    expected_tokens: I8  # to prefill or expected to be returned, by estimated lengths
    queued_prompt_tokens: I8
    pages_held: I8
    num_pages: I8
    page_size: I8  # tokens
    found: I8  # first tokens of the request's prompt in its prefix cache; of decoding replicas


class RequestFigures(Record):
    """A request as a decider's rule sees it, without its answer's true length."""

    index: I8  # in the trace
    arrival: F8  # s
    input_length: I8
    expected: I8  # estimated tokens of its answer
    priority: I8
    deadline: F8  # s after arrival; infinity: none


class Coming(Record):
    """Requests on their way to a replica."""

    requests: I8
    tokens: I8  # they should return


@rule
def decision(
    request: RequestFigures, prefill: Table[ReplicaFigures], decode: Table[ReplicaFigures], settings: Any
) -> bool:  # fmt: skip
    """Whether a request goes to the prefill pools; a user's decider answers it.

    prefill: their replicas; decode: those of the other pools. settings: the decider's numbers.
    """
    return False


@rule
def pool_target(now: float, pool: Any, memory: npt.NDArray[Any], settings: Any) -> int:
    """The replicas that a pool should have; a user's scaler answers it.

    now: s. pool: its PoolView, with its place in the fleet as `name` and in ROLES as `role`. memory: numbers of this
    pool, kept from tick to tick. settings: the scaler's numbers.
    """
    return 0


_true_or_false, _whole = truth("decision"), whole("pool_target")


@rule
def splits(
    request: Any, prefill: Any, decode: Any, prefill_at: Any, decode_at: Any, counters: Any, coming: Any, settings: Any
) -> bool:  # fmt: skip
    """`decision` by current figures.

    request, settings: [1]. prefill, decode: records, whose figures that change are written here. prefill_at, decode_at:
    their places in counters (state.Counters) and coming (Coming).
    """
    _note_figures(prefill, prefill_at, counters, coming)
    _note_figures(decode, decode_at, counters, coming)
    return _true_or_false(decision(request[0], prefill, decode, settings[0]))


@rule
def _note_figures(replicas: Any, places: Any, counters: Any, coming: Any) -> None:
    for k in range(len(places)):
        own, on_way, seen = counters[places[k]], coming[places[k]], replicas[k]
        seen.num_waiting = own.num_waiting + on_way.requests
        seen.num_running = own.num_running
        seen.expected_tokens = own.expected_tokens + on_way.tokens
        seen.pages_held = own.pages_held


@rule
def replicas_wanted(now: float, pool: Any, memory: npt.NDArray[Any], settings: Any) -> int:
    """`pool_target`; settings: [1]."""
    return _whole(pool_target(now, pool, memory, settings[0]))
