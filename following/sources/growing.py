"""Logs that grow: an access log in any format of `dsim replay`, and the step log of dsim's hooks."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ...engine.errors import DsimError, TraceError
from ...files.read import MOST_OF_SETTINGS, cut, json_of, naming
from ...profiler.logged import PHASES
from ...profiler.samples import Samples
from ...profiler.steplog import SCHEMA, read_log
from ...traces.formats import TICKS_PER_SECOND, Asked
from ...traces.load import read_data
from ...traces.rows import container
from ..windows import Arrivals

EPOCH = 1e9  # s: earlier times are not since 1970
HELD = 7200.0  # s of requests and steps that are kept in memory
GRADES = ("rates", "rates and requests", "steps")


class Tail:
    """Reads the whole lines added to a file since the last read; a file that became shorter is read anew."""

    def __init__(self, path: Path) -> None:
        self.path, self._at, self.first = path, 0, b""

    def read(self) -> bytes:
        """The new whole lines, at most MOST_OF_SETTINGS bytes; b"" if there are none."""
        with naming(self.path, "read", TraceError), open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self._at:
                self._at, self.first = 0, b""
            file.seek(self._at)
            data = file.read(MOST_OF_SETTINGS)
        whole = data[: data.rfind(b"\n") + 1]
        if len(data) == MOST_OF_SETTINGS and not whole:
            raise TraceError(f"{self.path}: a line is longer than {MOST_OF_SETTINGS} bytes")
        if not self._at and whole:
            self.first = whole[: whole.index(b"\n") + 1]
        self._at += len(whole)
        return whole


class AccessLog:
    """The requests of a log that grows."""

    def __init__(self, path: Path, columns: str | None, only: str | None, time_unit: str | None) -> None:
        self._tail = Tail(path)
        self._asked, self._unit = Asked(None, columns, only, True), time_unit
        self._time, self._input, self._output = (np.zeros(0) for _ in range(3))
        self.read()

    def read(self) -> None:
        """Take what was added."""
        fresh = not self._tail.first
        data = self._tail.read()
        if not data.strip():
            return
        path = str(self._tail.path)
        kind = container(path, self._tail.first)
        if kind not in ("csv", "jsonl"):
            raise TraceError(f"{path}: is {kind}, expected a log that grows by lines: CSV or JSON lines")
        if kind == "csv" and not fresh:
            data = self._tail.first + data
        elif kind == "csv" and data.count(b"\n") < 2:
            return  # only the header
        found, form = read_data(path, data, self._asked)
        unit = "ns" if form.unit == "datetime" else self._unit or form.unit
        time = found.time / TICKS_PER_SECOND[unit]
        if len(time) and not time.min() > EPOCH:
            raise TraceError(
                f"{path}: its first request is at {time.min():g} s, expected dates or seconds since 1970 "
                "(--time-unit says another unit)"
            )
        for name, column in (("_time", time), ("_input", found.input_length), ("_output", found.output_length)):
            setattr(self, name, np.concatenate([getattr(self, name), column]))
        kept = (self._time > self._time.max() - HELD) & (self._output > 0) if len(self._time) else slice(None)
        self._time, self._input, self._output = self._time[kept], self._input[kept], self._output[kept]

    def arrivals(self, begin: float, end: float) -> Arrivals:
        """The requests that arrived in a stretch of time (s since 1970)."""
        self.read()
        inside = np.flatnonzero((self._time >= begin) & (self._time < end))
        inside = inside[np.argsort(self._time[inside], kind="stable")]
        return Arrivals(self._time[inside] - begin, self._input[inside], self._output[inside], drawn=False)


@dataclass(frozen=True)
class StepsSeen:
    """The steps of a stretch of time."""

    steps: Samples
    forwards: float  # of rows that denoise
    tokens: float  # emitted


class StepLogTail:
    """The steps of a log that grows."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._lines: list[tuple[float, dict[str, Any]]] = []  # steps, and the requests before them
        self._open: dict[Any, dict[str, Any]] = {}  # requests that have not ended before these lines
        self._started = 0.0
        self.read()

    def read(self) -> None:
        """Take what was added."""
        fresh = not self._tail.first
        lines = self._tail.read().split(b"\n")
        if fresh and self._tail.first:
            head = self._object(lines.pop(0))
            if head.get("schema") != SCHEMA or not isinstance(head.get("started"), int | float):
                raise DsimError(
                    f"{self._tail.path}: schema is {cut(head.get('schema'))} and started {cut(head.get('started'))}, "
                    f"expected {SCHEMA} and a time since 1970, which the hooks write"
                )
            self._started = float(head["started"])
        for line in filter(None, lines):
            value = self._object(line)
            if value.get("kind") == "sequence":  # useless without earlier lines
                continue
            last = self._lines[-1][0] if self._lines else self._started
            start = value.get("start")
            self._lines.append((self._started + start if isinstance(start, int | float) else last, value))
        while self._lines and self._lines[0][0] < self._lines[-1][0] - HELD:
            self._forget(self._lines.pop(0)[1])

    def steps(self, begin: float, end: float) -> StepsSeen | None:
        """The steps that began in a stretch of time (s since 1970); None if there are none."""
        self.read()
        opened = dict(self._open)
        chosen: list[dict[str, Any]] = []
        for time, value in self._lines:
            if time >= end:
                break
            if time >= begin:
                chosen.append(value)
            elif value.get("kind") == "request":
                opened[value.get("request")] = value
            elif value.get("kind") == "finish":
                opened.pop(value.get("request"), None)
        if not any(value.get("kind") == "step" for value in chosen):
            return None
        head = json.loads(self._tail.first)
        with TemporaryDirectory() as folder:
            path = Path(folder) / self._tail.path.name
            text = "\n".join(json.dumps(value) for value in (head, *opened.values(), *chosen))
            path.write_text(text + "\n", encoding="utf-8")
            log = read_log(path)
        decodes = np.isin(log.rows.phase, [PHASES.index(name) for name in ("denoise", "flush")])
        return StepsSeen(log.steps, float(decodes.sum()), float(log.rows.emitted.sum()))

    def _forget(self, value: dict[str, Any]) -> None:
        if value.get("kind") == "request":
            self._open[value.get("request")] = value
        elif value.get("kind") == "finish":
            self._open.pop(value.get("request"), None)

    def _object(self, line: bytes) -> dict[str, Any]:
        try:
            value = json_of(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise DsimError(f"{self._tail.path}: a line is not a JSON object, expected a step log")
        return value


class GrowingLogs:
    """An access log, a step log, both or none."""

    def __init__(self, access: AccessLog | None = None, steps: StepLogTail | None = None) -> None:
        self._access, self._steps = access, steps
        self.ahead = 0.0  # s by which the follower's time is ahead of the logs'
        rates, requests, with_steps = GRADES
        self.grade = with_steps if steps is not None else rates if access is None else requests

    def arrivals(self, begin: float, end: float) -> Arrivals | None:
        """The requests of a stretch of time (s since 1970); None without an access log."""
        found = None if self._access is None else self._access.arrivals(begin - self.ahead, end - self.ahead)
        return found if found is None or len(found) else None

    def steps(self, begin: float, end: float) -> StepsSeen | None:
        """The steps of a stretch of time; None if no log has them."""
        return None if self._steps is None else self._steps.steps(begin - self.ahead, end - self.ahead)
