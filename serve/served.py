"""The replicas behind a server: routes requests, refuses what is too much, sends each client its tokens."""

import asyncio
import json
import logging
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.commits import CommitDraws, Commits
from ..engine.engine import Engine
from ..engine.errors import DsimError, cut
from ..engine.journal import Append, RequestTable, StepRecorder, StepTotals
from ..engine.loop import Executor
from ..engine.prefix import ToldPrefixes
from ..engine.request import Request
from ..engine.step import StepOutcome, StepPlan
from ..files.write import check_file
from ..results.engine_metrics import engine_of
from ..sim.routers.router import Router
from .counts import Watch
from .real_time import Clock
from .replica_thread import Ids, Replica

_log = logging.getLogger("dsim.serve")
STOPPING = "the server stopped before the reply's end"
BATCH = 1024  # steps per journal batch
# By request, slot and length: its sequence's tokens up to that length.
Text = Callable[[int, int, int], Ids]


class RefusedError(Exception):
    """A request answered with an error; headers may say when to retry."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Emission:
    tokens: Sequence[int]
    last: bool


@dataclass(eq=False)
class Stream:
    """A reply: the replica's thread puts emissions, the server's loop reads them."""

    index: int
    input_length: int
    output_length: int
    prompt: Ids
    replica: Replica
    loop: asyncio.AbstractEventLoop
    arrival: float  # s
    due: float  # s: when it reaches the engine
    emissions: "asyncio.Queue[Emission | str]" = field(default_factory=asyncio.Queue)  # a text says why no more come
    begun: bool = False  # was in a step
    num_sent: int = 0  # tokens
    first_sent: float | None = None  # s
    last_sent: float = 0.0  # s

    def put(self, emission: Emission | str) -> None:
        """Callable from any thread."""
        with suppress(RuntimeError):  # the loop has closed
            self.loop.call_soon_threadsafe(self.emissions.put_nowait, emission)


class AccessLog:
    """One JSON line per ended request, which `dsim replay` reads as a trace of format `dsim`.

    Arrivals are s since 1970, on the server's clock.
    """

    def __init__(self, path: Path, opened: float, force: bool = False) -> None:
        """opened: s since 1970 when the server's clock was 0."""
        self._opened = opened
        self._file = check_file(path, force=force).open("w", encoding="utf-8", buffering=1)  # flushes every line
        self._lock = threading.Lock()

    def write(self, stream: Stream, status: str, end: float) -> None:
        """end: s on the server's clock."""
        line: dict[str, Any] = {
            "arrival": self._opened + stream.arrival,
            "input_length": stream.input_length,
            "output_length": stream.num_sent,
            "max_tokens": stream.output_length,
            "status": status,
            "id": str(stream.index),
            "measured_e2el": end - stream.arrival,
        }
        if stream.first_sent is not None:
            line["measured_ttft"] = stream.first_sent - stream.arrival
        with self._lock:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


@dataclass(eq=False)
class Fleet:
    """Engines and executors of one policy in real time; the server's loop calls its methods.

    table: a row for each request in the server's life. draws: commit draws; `submit` registers each request's lengths.
    prefixes: names of prompts' blocks; `submit` adds each prompt. append: receiver of the journal's steps in batches,
    from one thread at a time. vocab: limit of prompts' token ids. frontend: a request's delay, s. metrics_as: engine
    that names the metrics; None: the one in the policy's name. simulates: whether a step takes its predicted time.
    """

    engines: Sequence[Engine]
    router: Router
    table: RequestTable
    clock: Clock
    _: KW_ONLY
    draws: Commits | None = None
    append: Append | None = None
    prefixes: ToldPrefixes | None = None
    vocab: int | None = None
    frontend: float = 0.0  # s
    metrics_as: str | None = None
    simulates: bool = False

    def __post_init__(self) -> None:
        self.publishes = engine_of(self.engines[0].policy.name, self.metrics_as)
        self.access: AccessLog | None = None
        self.num_requests = 0
        self.replicas: list[Replica] = []
        self.watches: list[Watch] = []  # one per replica
        self._stopping: str | None = None
        self._recording = threading.Lock()
        self._entering = threading.Lock()  # no stream enters a replica that has ended its streams
        self._streams: dict[int, Stream] = {}

    def start(self, executors: Sequence[Executor], text: Text | None = None) -> None:
        """text: reads replies' tokens; without it they are zeros."""
        for engine, executor in zip(self.engines, executors, strict=True):
            recorder = StepRecorder(self._record, engine.policy.width, BATCH) if self.append is not None else None
            committed, ended = partial(self._send, text), partial(self._end, len(self.replicas))
            host = getattr(executor, "host", None)
            self.watches.append(Watch(self.publishes, engine, self.prefixes, host))
            replica = Replica(
                engine=engine,
                executor=executor,
                clock=self.clock,
                committed=committed,
                ended=ended,
                recorder=recorder,
                simulates=self.simulates,
                entering=self._entering,
            )
            self.replicas.append(replica)
        for replica in self.replicas:
            replica.start()

    @property
    def idle(self) -> bool:
        return not self._streams

    @property
    def failure(self) -> str | None:
        return next((_failure(replica) for replica in self.replicas if replica.failure is not None), None)

    @property
    def closed(self) -> str | None:
        """Why requests are refused until a restart; None if they are not."""
        if self.num_requests >= len(self.table.rows):
            return f"the journal holds {self.num_requests} requests and is full: restart the server"
        return self.failure or self._stopping

    def prompt(self, request: int, length: int) -> Ids:
        stream = self._streams.get(request)
        return np.zeros(length, np.int32) if stream is None else stream.prompt

    def submit(self, prompt: Sequence[int], output_length: int, **wishes: Any) -> Stream:
        """Take a request, or raise RefusedError. wishes: priority, deadline and slo_class of Request."""
        index = self.num_requests
        request = Request(index, self.clock(), len(prompt), output_length, max_tokens=output_length, **wishes)
        if not self.engines[0].fits(request):
            limits = self.engines[0].limits
            raise RefusedError(
                400,
                f"prompt and output are {len(prompt)} + {output_length} tokens, expected at most "
                f"{limits.context_limit} together and {limits.num_pages} KV pages",
            )
        ids = np.asarray(prompt, np.int32)
        if self.vocab is not None and ids.max(initial=0) >= self.vocab:
            raise RefusedError(400, f"prompt holds token id {ids.max()}, expected below {self.vocab}")
        if (reason := self.closed) is not None:
            raise RefusedError(503, reason)
        if self.prefixes is not None:
            self.prefixes.tell(index, ids)
        replica = self.replicas[self.router.route(self.engines, request)]
        if isinstance(self.draws, CommitDraws):
            self.draws.seat(np.array([index]), np.array([len(prompt)]), np.array([output_length]))
        with self._entering:
            if not replica.alive:
                raise RefusedError(503, self.closed or STOPPING)
            request = replace(request, arrival=self.clock())  # inside the lock: no step that ends later misses it
            due = request.arrival + self.frontend
            stream = Stream(
                index=index,
                input_length=len(prompt),
                output_length=output_length,
                prompt=ids,
                replica=replica,
                loop=asyncio.get_running_loop(),
                arrival=request.arrival,
                due=due,
            )
            self.num_requests += 1
            self._streams[index] = stream
            replica.submit(request, due)
        return stream

    def cancel(self, stream: Stream) -> None:
        """End a request whose client disconnected, if it has not ended."""
        if self._streams.pop(stream.index, None) is not None:
            self._note_end(stream, "cancelled", self.clock())
            stream.replica.cancel(stream.index)

    def end_replies(self, reason: str) -> None:
        """Refuse further requests and end all replies: unfinished in the journal."""
        with self._entering:
            self._stopping = reason
            self._end_streams(list(self._streams.values()), reason)

    def stop(self) -> StepTotals:
        """Stop after each replica's current step; returns the sum of their totals."""
        self._stopping = self._stopping or STOPPING
        totals = StepTotals()
        for replica in self.replicas:
            replica.stop()
            totals.merge(replica.engine.totals)
        if self.access is not None:
            self.access.close()
        return totals

    def _send(self, text: Text | None, plan: StepPlan, outcome: StepOutcome, done: Ids, now: float) -> None:
        """Send clients what a step emitted; in the replica's thread."""
        ended = set(done.tolist())
        watch = self.watches[int(self.table["replica"][plan.requests[0]])]
        num_prompt, num_sent = 0, 0
        emissions: list[tuple[Stream, Emission]] = []
        for request, slot in zip(plan.requests.tolist(), plan.slots.tolist(), strict=True):
            stream = self._streams.get(request)
            if stream is None:  # the client disconnected
                continue
            if not stream.begun:
                stream.begun = True
                watch.begun(request, stream.due)
            num, last = int(self.table["num_tokens"][request]), request in ended
            if num == stream.num_sent and not last:
                continue
            tokens = _new_tokens(stream, slot, num, text)
            num_prompt += watch.sent(
                request,
                len(tokens),
                first=stream.num_sent == 0,
                last=last,
                gap=now - stream.last_sent,
                output_length=stream.output_length,
            )
            num_sent += len(tokens)
            stream.num_sent, stream.last_sent = num, now
            stream.first_sent = stream.first_sent or now
            # Before its client knows: an ended request cannot be cancelled.
            if last and self._streams.pop(request, None) is not None:
                self._note_end(stream, "completed", now)
            emissions.append((stream, Emission(tokens, last)))
        # Counted first: metrics read after a reply include it.
        watch.step(plan, outcome, num_sent, num_prompt)
        for stream, emission in emissions:
            stream.put(emission)

    def _note_end(self, stream: Stream, status: str, now: float) -> None:
        if self.access is not None:
            self.access.write(stream, status, now)

    def _record(self, columns: Mapping[str, Any], lists: Mapping[str, Any]) -> None:
        assert self.append is not None
        with self._recording:
            self.append(columns, lists)

    def _end(self, index: int) -> None:
        """End the replies of a replica that stopped; in its thread."""
        replica = self.replicas[index]
        if replica.failure is not None:
            _log.critical("%s", _failure(replica))
            if not isinstance(replica.failure, DsimError):  # a bug in dsim
                _log.critical("%s", "".join(traceback.format_exception(replica.failure)))
        with self._entering:
            self._end_streams([s for s in self._streams.values() if s.replica is replica], _failure(replica))

    def _end_streams(self, streams: Sequence[Stream], reason: str) -> None:
        for stream in streams:
            if self._streams.pop(stream.index, None) is not None:
                self._note_end(stream, "error", self.clock())
                stream.put(reason)


def _failure(replica: Replica) -> str:
    error = replica.failure
    if error is None:
        return STOPPING
    reason = cut(error, 500)
    if not isinstance(error, DsimError):
        reason = f"{type(error).__name__}: {reason}"
    return f"replica {replica.engine.replica} failed: {reason}"


def _new_tokens(stream: Stream, slot: int, num: int, text: Text | None) -> Sequence[int]:
    """The unsent ones of a reply's first `num` tokens."""
    if text is None:
        return [0] * (num - stream.num_sent)
    begin = stream.input_length + stream.num_sent
    tokens: list[int] = text(stream.index, slot, stream.input_length + num)[begin:].tolist()
    return tokens
