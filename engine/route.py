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
    memory: Sent | None = None


def nothing_sent() -> Sent:
    """The memory of a router without one."""
    return sent_of(Prefixes(1, [], []), np.zeros(0, np.int64), 0, 0, (0.0, 0.0, 0.0))


def sent_of(
    prefixes: Prefixes, input_length: npt.NDArray[np.int64], replicas: int, limit: int, bounds: tuple[float, ...]
) -> Sent:
    """An empty memory for a run; limit, bounds: as in `Sent.numbers`."""
    of_replica = np.zeros(replicas, dtype_of(SentTo))
    of_replica["first"] = -1
    counts = np.minimum(np.diff(prefixes.offsets), -(-input_length // prefixes.block))
    record: Any = Sent
    return record(
        np.zeros((replicas, prefixes.num_names), np.int32), np.zeros(len(input_length), np.int32), table(of_replica),
        prefixes.offsets, counts, prefixes.names, np.array([prefixes.block, limit, *bounds], np.float64),
    )  # fmt: skip


@rule
def choose(places: Any, figures: Any, queues: Any, memory: Sent, request: int, tokens: int) -> int:
    """The place of the replica for a request with `tokens` in its prompt.

    places: of available replicas. figures, queues: columns of all replicas' counters, to be summed. Without a memory:
    the least sum of figures, the first of equals.
    """
    if len(memory.replicas) == 0:
        return _least(places, figures, memory, 0)
    shortest, longest, place = 0, 0, int(places[0])
    for k in range(len(places)):
        waiting = queues[0][places[k]] + queues[1][places[k]]
        if k == 0 or waiting < shortest:
            shortest, place = waiting, int(places[k])
        longest = waiting if k == 0 else max(longest, waiting)
    if not (longest - shortest > memory.numbers[3] and longest > memory.numbers[4] * shortest):
        place = _sent_most(places, figures, memory, request, tokens)
    _note(memory, place, request)
    return place


@rule
def _sent_most(places: Any, figures: Any, memory: Sent, request: int, tokens: int) -> int:
    """The replica that was sent most of a prompt's beginning; of equals, or without enough, the least loaded."""
    block, longest = int(memory.numbers[0]), 0
    for k in range(len(places)):
        num_blocks = _known(memory, int(places[k]), request)
        memory.replicas[places[k]].known = num_blocks
        longest = max(longest, num_blocks)
    return _least(places, figures, memory, longest if longest * block > memory.numbers[2] * tokens else 0)


@rule
def _least(places: Any, figures: Any, memory: Sent, num_blocks: int) -> int:
    """The first place with the least sum of figures, among places with `num_blocks` blocks; 0: among all."""
    best, lowest = -1, 0
    for k in range(len(places)):
        if num_blocks > 0 and memory.replicas[places[k]].known != num_blocks:
            continue
        total = 0
        for column in figures:
            total += column[places[k]]
        if best < 0 or total < lowest:
            best, lowest = int(places[k]), total
    return best


@rule
def _known(memory: Sent, place: int, request: int) -> int:
    """Blocks of a prompt's beginning that were sent to a replica."""
    begin = memory.offsets[request]
    for i in range(memory.counts[request]):
        if memory.last[place, memory.names[begin + i]] == 0:
            return int(i)
    return int(memory.counts[request])


@rule
def _note(memory: Sent, place: int, request: int) -> None:
    """Note that a prompt goes to a replica; forget what exceeds the limit."""
    entry, begin, count = memory.replicas[place], memory.offsets[request], memory.counts[request]
    if count == 0:
        return
    for i in range(count):
        name = memory.names[begin + i]
        if memory.last[place, name] == 0:
            entry.names += 1
        memory.last[place, name] = request + 1
    if entry.first < 0:
        entry.first = request
        entry.forgotten = 0
    else:
        memory.following[entry.newest] = request
    entry.newest = request
    while entry.names > memory.numbers[1]:
        oldest = entry.first
        if entry.forgotten == memory.counts[oldest]:
            entry.first = memory.following[oldest]
            entry.forgotten = 0
            continue
        entry.forgotten += 1
        name = memory.names[memory.offsets[oldest] + memory.counts[oldest] - entry.forgotten]
        if memory.last[place, name] == oldest + 1:
            memory.last[place, name] = 0
            entry.names -= 1
