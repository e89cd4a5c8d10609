"""The replicas behind a server: who takes a request, when there are too many, and what reaches whom."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.commits import CommitDraws
from ..engine.engine import Engine
from ..engine.journal import Append, RequestTable, StepRecorder, StepTotals
from ..engine.prefix import ToldPrefixes
from ..engine.request import Request
from ..engine.step import StepPlan
from ..live.loop import Executor
from ..sim.router import Router
from .driver import Clock
from .replica import Replica

Ids = npt.NDArray[np.int32]
# The tokens of a row's request that its slot holds, up to a length; the twin has none.
Text = Callable[[int, int, int], Ids]


class TooLongError(Exception):
    """A request that could never be served."""


class BusyError(Exception):
    """A request that is not taken now."""


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens that reached a client at once."""

    tokens: Sequence[int]
    last: bool


@dataclass(eq=False)
class Stream:
    """One request's way back to its client: emissions come from the replica's thread into the server's loop."""

    index: int
    input_length: int
    output_length: int
    prompt: Ids
    replica: Replica
    loop: asyncio.AbstractEventLoop
    emissions: "asyncio.Queue[Emission | None]" = field(default_factory=asyncio.Queue)  # None: the replica failed
    num_told: int = 0

    def put(self, emission: Emission | None) -> None:
        """Hand an emission to the loop, from any thread."""
        with suppress(RuntimeError):  # the loop has closed: nobody listens
            self.loop.call_soon_threadsafe(self.emissions.put_nowait, emission)


class Fleet:
    """Engines and executors of one policy, served in real time. Its methods are for the server's loop alone.

    table: room for as many requests as the server takes in its life. draws: told each request's lengths.
    append: receives the journal's steps in batches, from one thread at a time. prefixes: told each request's prompt.
    """

    def __init__(
        self, engines: Sequence[Engine], route: Router, table: RequestTable, clock: Clock, *, max_waiting: int,
        draws: CommitDraws | None = None, append: Append | None = None, prefixes: ToldPrefixes | None = None,
    ) -> None:  # fmt: skip
        self.engines = list(engines)
        self.table = table
        self.num_requests = 0
        self.num_refused = 0
        self.replicas: list[Replica] = []
        self._route = route
        self._clock = clock
        self._max_waiting = max_waiting
        self._draws = draws
        self._append = append
        self._prefixes = prefixes
        self._one_at_a_time = threading.Lock()
        self._streams: dict[int, Stream] = {}

    def start(self, executors: Sequence[Executor], text: Text | None = None) -> None:
        """Begin to serve. text: where the tokens of replies are; without, they are zeros."""
        for engine, executor in zip(self.engines, executors, strict=True):
            recorder = None if self._append is None else StepRecorder(self._record, engine.policy.width, 256)

            def told(plan: StepPlan, done: Ids) -> None:
                self._tell(plan, done, text)

            ended = partial(self._end, len(self.replicas))
            self.replicas.append(Replica(engine, executor, self._clock, told, ended, recorder))
        for replica in self.replicas:
            replica.start()

    def prompt(self, request: int, length: int) -> Ids:
        """The prompt of a request, for an executor."""
        stream = self._streams.get(request)
        return np.zeros(length, np.int32) if stream is None else stream.prompt

    def submit(self, prompt: Sequence[int], output_length: int) -> Stream:
        """Take a request in; TooLongError where it could never fit, BusyError where too many wait."""
        index = self.num_requests
        request = Request(index, self._clock(), len(prompt), output_length)
        if not self.engines[0].fits(request):
            limits = self.engines[0].limits
            raise TooLongError(
                f"prompt and output are {len(prompt)} + {output_length} tokens, expected at most "
                f"{limits.context_limit} together and {limits.num_pages} KV pages"
            )
        waiting = sum(replica.num_waiting for replica in self.replicas)
        if waiting >= self._max_waiting or index >= len(self.table["request"]):
            self.num_refused += 1
            if waiting < self._max_waiting:
                raise BusyError(f"the journal holds {index} requests and is full: restart the server")
            raise BusyError(f"{waiting} requests wait, expected fewer than {self._max_waiting}")
        ids = np.asarray(prompt, np.int32)
        if self._prefixes is not None:
            self._prefixes.tell(index, ids)
        replica = self.replicas[self._route(self.engines, request)]
        if not replica.alive:
            raise BusyError("the server is stopping" if replica.failure is None else "the replica has failed")
        self.num_requests += 1
        if self._draws is not None:
            self._draws.seat(np.array([index]), np.array([len(prompt)]), np.array([output_length]))
        stream = Stream(index, len(prompt), output_length, ids, replica, asyncio.get_running_loop())
        self._streams[index] = stream
        replica.inbox.submit(request)
        return stream

    def cancel(self, stream: Stream) -> None:
        """The client of a request that is not over has gone."""
        if self._streams.pop(stream.index, None) is not None:
            stream.replica.inbox.cancel(stream.index)

    def stop(self) -> StepTotals:
        """End every replica after its step in flight, and add up what they did."""
        totals = StepTotals()
        for replica in self.replicas:
            replica.stop()
            totals.merge(replica.engine.totals)
        return totals

    def _tell(self, plan: StepPlan, done: Ids, text: Text | None) -> None:
        """Hand out what a step emitted; in the replica's thread."""
        over = set(done.tolist())
        emitted = self.table["num_tokens"]
        for request, slot in zip(plan.requests.tolist(), plan.slots.tolist(), strict=True):
            stream = self._streams.get(request)
            if stream is None:  # its client has gone
                continue
            num = int(emitted[request])
            if num == stream.num_told and request not in over:
                continue
            if text is None:
                tokens: Sequence[int] = [0] * (num - stream.num_told)
            else:
                begin = stream.input_length + stream.num_told
                tokens = text(request, slot, stream.input_length + num)[begin:].tolist()
            stream.num_told = num
            if request in over:  # before its client hears of it: what is over is not cancelled
                self._streams.pop(request, None)
            stream.put(Emission(tokens, request in over))

    def _record(self, columns: Mapping[str, Any], lists: Mapping[str, Any]) -> None:
        assert self._append is not None
        with self._one_at_a_time:
            self._append(columns, lists)

    def _end(self, replica: int) -> None:
        """Tell the clients of a replica that nothing more will come; in the replica's thread."""
        for stream in list(self._streams.values()):
            if stream.replica is self.replicas[replica]:
                self._streams.pop(stream.index, None)
                stream.put(None)
