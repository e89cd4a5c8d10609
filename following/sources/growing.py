"""Logs that grow: an access log in any format of `dsim replay`, and the step log of dsim's hooks."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from ...engine.errors import DsimError, TraceError
from ...files.read import MOST_OF_SETTINGS, cut, naming, parsing
from ...profiler.logged import PHASES
from ...profiler.samples import Samples
from ...profiler.steplog import SCHEMA, log_of
from ...traces.formats import TICKS_PER_SECOND, Asked
from ...traces.load import read_data
from ...traces.rows import container, parse_object
from ..windows import Arrivals

EPOCH = 1e9  # s: earlier times are not since 1970
HELD = 7200.0  # s of requests and steps that are kept in memory
FAR = 1800.0  # s between a log's newest request and the page: the log has another clock
T = TypeVar("T")


class Tail:
    """Reads the whole lines added to a log: through a rotation by rename, and anew if it became shorter."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def read(self) -> Iterator[tuple[bytes, bytes]]:
        """The new whole lines in pieces of one file, each with the file's first line if that was read before."""
        with naming(self.path, "read", TraceError):
            while True:
                is_new = self._file is None or self._is_replaced(self._file)
                if self._file is not None:
                    yield from self._rest(self._file)
                if not is_new:
                    return
                # Until the next file is opened this one stays open: its last lines may come after its renaming.
                self._file, self._first = open(self.path, "rb"), b""  # noqa: SIM115 - it stays open

    def _is_replaced(self, file: BinaryIO) -> bool:
        """Whether another file has the name, and lines: its writer has left this one."""
        with suppress(FileNotFoundError):
            now = os.stat(self.path)
            return now.st_size > 0 and not os.path.samestat(now, os.fstat(file.fileno()))
        return False

    def _rest(self, file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
        if os.fstat(file.fileno()).st_size < file.tell():
            file.seek(0)
        while True:
            start = file.tell()
            data = file.read(MOST_OF_SETTINGS)
            whole = data[: data.rfind(b"\n") + 1]
            if len(data) == MOST_OF_SETTINGS and not whole:
                raise TraceError(f"{self.path}: a line is longer than {MOST_OF_SETTINGS} bytes")
            file.seek(start + len(whole))
            if not whole:
                return
            # Truncating a log that is written to leaves null bytes.
            whole = whole.replace(b"\0", b"").decode("utf-8", "replace").encode()
            if not start:
                self._first = whole[: whole.index(b"\n") + 1]
            yield self._first if start else b"", whole


class AccessLog:
    """The requests of a log that grows."""

    def __init__(self, path: Path, columns: str | None, only: str | None, time_unit: str | None) -> None:
        self.path, self._tail = path, Tail(path)
        self._asked, self._unit = Asked(columns, only, True), time_unit
        self._requests = np.zeros((3, 0))  # time, input and output length

    def read(self) -> None:
        """Take what was added; TraceError if it holds none of these requests."""
        path = str(self.path)
        for head, lines in self._tail.read():
            kind = container(path, head or lines)
            if kind not in ("csv", "jsonl"):
                raise TraceError(f"{path}: is {kind}, expected a log that grows by lines: CSV or JSON lines")
            lines = head + lines if kind == "csv" else lines
            if lines.strip() and lines.count(b"\n") > (kind == "csv"):  # more than the header
                self._take(path, lines)

    def _take(self, path: str, lines: bytes) -> None:
        found, form = read_data(path, lines, self._asked)
        unit = "ns" if form.unit == "datetime" else self._unit or form.unit
        time = found.time / TICKS_PER_SECOND[unit]
        if len(time) and not time.max() > EPOCH:
            raise TraceError(
                f"{path}: its last request is at {time.max():g} s, expected dates or seconds since 1970 "
                "(--time-unit says another unit)"
            )
        added = np.stack([time, found.input_length, found.output_length])
        self._requests = np.hstack([self._requests, added[:, (time > EPOCH) & (found.output_length > 0)]])

    def arrivals(self, begin: float, end: float, now: float = math.inf) -> Arrivals | None:
        """The requests that arrived in a stretch of time (s since 1970); long before it they are forgotten.

        None if there are none; TraceError if the newest is long after `now`, or long before a stretch without any.
        """
        newest = self._requests[0].max(initial=-math.inf)
        self._requests = self._requests[:, self._requests[0] > begin - HELD]
        time = self._requests[0]
        inside = np.flatnonzero((time >= begin) & (time < end))
        is_late = (time > now + FAR).sum() > len(inside)
        apart = newest - now if is_late else 0.0 if len(inside) else min(newest - end, 0.0)
        if FAR < abs(apart) < math.inf:
            hours = f"{abs(apart) / 3600:.1f} h {'after' if apart > 0 else 'before'} the server's page"
            raise TraceError(f"{self.path}: its newest request is {hours}, expected one clock, and UTC without a zone")
        time, inputs, outputs = self._requests[:, inside[np.argsort(time[inside], kind="stable")]]
        return Arrivals(time - begin, inputs, outputs, drawn=False) if len(inside) else None


@dataclass(frozen=True)
class StepsSeen:
    """The steps of a stretch of time."""

    steps: Samples
    forwards: float  # of rows that denoise
    tokens: float  # emitted


class StepLogTail:
    """The steps of a log that grows."""

    def __init__(self, path: Path) -> None:
        self.path, self._tail = path, Tail(path)
        self._head: dict[str, Any] = {}
        self._lines: list[tuple[float, dict[str, Any]]] = []  # steps, and the requests before them
        self._open: dict[Any, dict[str, Any]] = {}  # requests that have not ended before these lines

    def read(self) -> None:
        """Read the added lines; DsimError if a log lacks the hooks' first line."""
        for head, added in self._tail.read():
            lines = added.decode().split("\n")
            if not head:
                self._begin(lines.pop(0))
            for value in map(parse_object, lines):
                if isinstance(value, str) or value.get("kind") == "sequence":  # useless without earlier lines
                    continue
                start, last = value.get("start"), self._lines[-1][0] if self._lines else self._head["started"]
                is_time = isinstance(start, int | float) and abs(start) < EPOCH
                self._lines.append((self._head["started"] + start if is_time else last, value))

    def _begin(self, line: str) -> None:
        found = parse_object(line)
        head = {} if isinstance(found, str) else found
        started = head.get("started")
        if head.get("schema") != SCHEMA or not isinstance(started, int | float) or not abs(started) < 100 * EPOCH:
            raise DsimError(
                f"{self.path}: schema is {cut(head.get('schema'))} and started {cut(started)}, expected {SCHEMA} and a "
                "time since 1970, which the hooks write"
            )
        self._head, self._lines, self._open = head, [], {}

    def steps(self, begin: float, end: float) -> StepsSeen | None:
        """The steps that began in a stretch of time (s since 1970); None if there are none."""
        early = [value for time, value in self._lines if time < begin - HELD]
        self._lines = [(time, value) for time, value in self._lines if time >= begin - HELD]
        self._open = _still_open(self._open, early)
        before = [value for time, value in self._lines if time < begin]
        chosen = [value for time, value in self._lines if begin <= time < end]
        if not any(value.get("kind") == "step" for value in chosen):
            return None
        lines = (self._head, *_still_open(self._open, before).values(), *chosen)
        log = log_of(self.path, ((str(self.path), line) for line in lines))
        decodes = np.isin(log.rows.phase, [PHASES.index(name) for name in ("denoise", "flush")])
        return StepsSeen(log.steps, float(decodes.sum()), float(log.rows.emitted.sum()))


def _still_open(opened: dict[Any, dict[str, Any]], lines: Iterable[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The requests, by number, that have begun and not ended after these lines."""
    opened = dict(opened)
    for value in lines:
        if value.get("kind") == "request":
            opened[value.get("request")] = value
        elif value.get("kind") == "finish":
            opened.pop(value.get("request"), None)
    return opened


class GrowingLogs:
    """An access log, a step log, both or none. What a log holds ends nothing: it is told, once."""

    def __init__(
        self, access: AccessLog | None = None, steps: StepLogTail | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self._access, self._steps, self._tell = access, steps, tell
        self._told: set[tuple[Path, str]] = set()
        self.ahead = 0.0  # s by which the follower's time is ahead of the logs'
        self._now = math.inf

    def read(self, now: float = math.inf, *, strict: bool = False) -> None:
        """Take what was added up to `now` (s since 1970). strict: raise what is wrong with it."""
        self._now = now
        for log in (self._access, self._steps):
            if log is not None and strict:
                log.read()
            elif log is not None:
                self._safely(log, log.read)

    def arrivals(self, begin: float, end: float) -> Arrivals | None:
        """The requests of a stretch of time (s since 1970); None if no log has them."""
        log, times = self._access, (time - self.ahead for time in (begin, end, self._now))
        return None if log is None else self._safely(log, log.arrivals, *times)

    def steps(self, begin: float, end: float) -> StepsSeen | None:
        """The steps of a stretch of time; None if no log has them."""
        log = self._steps
        return None if log is None else self._safely(log, log.steps, begin - self.ahead, end - self.ahead)

    def _safely(self, log: AccessLog | StepLogTail, read: Callable[..., T], *of: float) -> T | None:
        try:
            with parsing(log.path, "a log"):
                return read(*of)
        except DsimError as error:
            if (told := (log.path, read.__name__)) not in self._told:
                self._told.add(told)
                self._tell(f"Left out: {error}")
            return None
