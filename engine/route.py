"""The replica for a request, where compiled code and not `Router.route` chooses it."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .jit import rule
from .prefix import Prefixes
from .records import I4, Record, Table, dtype_of, table

MOST_MARKS = 1 << 24  # in `Sent.last`, 64 MiB


class SentTo(Record):
    """What was sent to a replica."""

    first: I4  # oldest request with remembered names; -1: none
    forgotten: I4  # last names of that request that are forgotten or were sent again
    newest: I4  # last request
    names: I4  # remembered
    known: I4  # scratch: blocks of a request's prompt


class Sent(NamedTuple):
    """A router's memory of prompts sent to each replica; names sent longest ago are forgotten first.

    A prompt's last name counts as sent first, so that prefixes outlive what follows.
    """

    last: npt.NDArray[np.int32]  # [replicas, names] 1 + the last request with the name; 0: never, or forgotten
    following: npt.NDArray[np.int32]  # [requests] the next request to the same replica
    replicas: Table[SentTo]  # [replicas]
    offsets: npt.NDArray[np.int64]  # [requests + 1] where each request's names begin
    counts: npt.NDArray[np.int64]  # [requests] names of its prompt
    names: npt.NDArray[np.int64]
    # [5] tokens of a block, names remembered per replica, and of LongestPrefix: the share of a prompt that a replica
    # must have been sent, and the difference and the ratio of queues above which the shortest is joined.
    numbers: npt.NDArray[np.float64]


class Choosing(NamedTuple):
    """How compiled code chooses a replica: by a memory, or by the least sum of figures."""

    figures: tuple[str, ...] = ()  # names of the counters
    sent: Sent | None = None


def nothing_sent() -> Sent:
    """The memory of a router without one."""
    return sent_of(Prefixes(1, [], []), np.zeros(0, np.int64), 0, 0, (0.0, 0.0, 0.0))


def sent_of(
    prefixes: Prefixes, input_length: npt.NDArray[np.int64], replicas: int, most: int, bounds: tuple[float, ...]
) -> Sent:
    """An empty memory for a run; most, bounds: as in `Sent.numbers`."""
    of_replica = np.zeros(replicas, dtype_of(SentTo))
    of_replica["first"] = -1
    counts = np.minimum(np.diff(prefixes.offsets), -(-input_length // prefixes.block))
    made: Any = Sent
    return made(
        np.zeros((replicas, prefixes.num_names), np.int32), np.zeros(len(input_length), np.int32), table(of_replica),
        prefixes.offsets, counts, prefixes.names, np.array([prefixes.block, most, *bounds], np.float64),
    )  # fmt: skip


@rule
def choose(places: Any, figures: Any, queues: Any, sent: Sent, request: int, tokens: int) -> int:
    """The place of the replica for a request with `tokens` in its prompt.

    places: of available replicas. figures, queues: columns of all replicas' counters, to be summed. Without a memory:
    the least sum of figures, the first of equals.
    """
    if len(sent.replicas) == 0:
        return _least(places, figures, sent, 0)
    shortest, longest, at = 0, 0, int(places[0])
    for k in range(len(places)):
        waiting = queues[0][places[k]] + queues[1][places[k]]
        if k == 0 or waiting < shortest:
            shortest, at = waiting, int(places[k])
        longest = waiting if k == 0 else max(longest, waiting)
    if not (longest - shortest > sent.numbers[3] and longest > sent.numbers[4] * shortest):
        at = _sent_most(places, figures, sent, request, tokens)
    _note(sent, at, request)
    return at


@rule
def _sent_most(places: Any, figures: Any, sent: Sent, request: int, tokens: int) -> int:
    """The replica that was sent most of a prompt's beginning; of equals, or without enough, the least loaded."""
    block, most = int(sent.numbers[0]), 0
    for k in range(len(places)):
        known = _known(sent, int(places[k]), request)
        sent.replicas[places[k]].known = known
        most = max(most, known)
    return _least(places, figures, sent, most if most * block > sent.numbers[2] * tokens else 0)


@rule
def _least(places: Any, figures: Any, sent: Sent, known: int) -> int:
    """The first place with the least sum of figures, of those that were sent `known` blocks; 0: of all."""
    best, lowest = -1, 0
    for k in range(len(places)):
        if known > 0 and sent.replicas[places[k]].known != known:
            continue
        total = 0
        for column in figures:
            total += column[places[k]]
        if best < 0 or total < lowest:
            best, lowest = int(places[k]), total
    return best


@rule
def _known(sent: Sent, at: int, request: int) -> int:
    """Blocks of a prompt's beginning that were sent to a replica."""
    begin = sent.offsets[request]
    for i in range(sent.counts[request]):
        if sent.last[at, sent.names[begin + i]] == 0:
            return int(i)
    return int(sent.counts[request])


@rule
def _note(sent: Sent, at: int, request: int) -> None:
    """Note that a prompt goes to a replica; forget what exceeds the limit."""
    own, begin, count = sent.replicas[at], sent.offsets[request], sent.counts[request]
    if count == 0:
        return
    for i in range(count):
        name = sent.names[begin + i]
        if sent.last[at, name] == 0:
            own.names += 1
        sent.last[at, name] = request + 1
    if own.first < 0:
        own.first = request
        own.forgotten = 0
    else:
        sent.following[own.newest] = request
    own.newest = request
    while own.names > sent.numbers[1]:
        oldest = own.first
        if own.forgotten == sent.counts[oldest]:
            own.first = sent.following[oldest]
            own.forgotten = 0
            continue
        own.forgotten += 1
        name = sent.names[sent.offsets[oldest] + sent.counts[oldest] - own.forgotten]
        if sent.last[at, name] == oldest + 1:
            sent.last[at, name] = 0
            own.names -= 1
