"""An access log that grows, in any format of `dsim replay`."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...engine.errors import DsimError, TraceError
from ...files.read import MOST_OF_SETTINGS, naming, parsing
from ...traces.formats import TICKS_PER_SECOND, Asked
from ...traces.load import read_data
from ...traces.rows import container
from ..windows import ARRIVAL, Arrivals, arrivals_at

EPOCH = 1e9  # s: earlier times are not since 1970
MEMORY = 7200.0  # s of requests that stay in memory
FAR = 1800.0  # s between a log's newest request and the page: the log has another clock


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
            lines = data[: data.rfind(b"\n") + 1]
            if len(data) == MOST_OF_SETTINGS and not lines:
                raise TraceError(f"{self.path}: a line is longer than {MOST_OF_SETTINGS} bytes")
            file.seek(start + len(lines))
            if not lines:
                return
            # Truncating a log that is written to leaves null bytes.
            lines = lines.replace(b"\0", b"").decode("utf-8", "replace").encode()
            if not start:
                self._first = lines[: lines.index(b"\n") + 1]
            yield self._first if start else b"", lines


class AccessLog:
    """The requests of a log that grows. What it holds ends nothing: `tell` gets a fault once."""

    def __init__(
        self, path: Path, columns: str | None, only: str | None, time_unit: str | None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self.path, self._tail, self._tell = path, Tail(path), tell
        self._options, self._unit = Asked(columns, only, True), time_unit
        self._requests: Arrivals = np.zeros(0, ARRIVAL).view(np.recarray)  # in s since 1970
        self._reported: set[str] = set()

    def read(self) -> None:
        """Take what was added."""
        try:
            with parsing(self.path, "a log"):
                self.read_added()
        except DsimError as error:
            self._report("read", str(error))

    def read_added(self) -> None:
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
        data, form = read_data(path, lines, self._options)
        unit = "ns" if form.unit == "datetime" else self._unit or form.unit
        time = data.time / TICKS_PER_SECOND[unit]
        if len(time) and not time.max() > EPOCH:
            raise TraceError(
                f"{path}: its last request is at {time.max():g} s, expected dates or seconds since 1970 "
                "(--time-unit says another unit)"
            )
        added = arrivals_at(time, data.input_length, data.output_length)
        self._requests = np.concatenate([self._requests, added[(added.time > EPOCH) & (added.output_length > 0)]])

    def arrivals(self, begin: float, end: float, now: float = math.inf) -> Arrivals | None:
        """The requests that arrived in a stretch of time (s since 1970); long before it they are forgotten.

        None if there are none, or if the newest is long after `now`, or long before a stretch without any.
        """
        newest = self._requests["time"].max(initial=-math.inf)
        self._requests = self._requests[self._requests["time"] > begin - MEMORY]
        time = self._requests["time"]
        inside = self._requests[(time >= begin) & (time < end)]
        distance = 0.0
        if (time > now + FAR).sum() > len(inside):
            distance = newest - now
        elif not len(inside):
            distance = min(newest - end, 0.0)
        if FAR < abs(distance) < math.inf:
            hours = f"{abs(distance) / 3600:.1f} h {'after' if distance > 0 else 'before'} the server's page"
            self._report(
                "arrivals", f"{self.path}: its newest request is {hours}, expected one clock, and UTC without a zone"
            )
            return None
        if not len(inside):
            return None
        return arrivals_at(inside["time"] - begin, inside["input_length"], inside["output_length"])

    def _report(self, step: str, fault: str) -> None:
        """Tell the first fault of each step."""
        if step not in self._reported:
            self._reported.add(step)
            self._tell(f"Left out: {fault}")
