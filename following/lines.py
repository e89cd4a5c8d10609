"""A file of JSON objects, one a line. A kill loses at most the line that was being written."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files.read import json_of, naming, read_bytes
from ..files.write import write_whole

Line = dict[str, Any]


class Lines:
    """Append-only; the oldest lines go when there are twice as many as `limit`."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._limit = path, limit
        self._count = len(list(self))

    def __iter__(self) -> Iterator[Line]:
        if not self._path.exists():
            return
        for text in read_bytes(self._path).split(b"\n"):
            with suppress(ValueError):  # cut short
                line = json_of(text)
                if isinstance(line, dict):
                    yield line

    def append(self, line: Line) -> None:
        # The newline comes first: it ends a line that a kill cut short.
        with naming(self._path), open(self._path, "ab") as file:
            file.write(b"\n" + _text(line).encode())
            file.flush()
            os.fsync(file.fileno())
        self._count += 1
        if self._count >= 2 * self._limit:
            self.replace(list(self)[-self._limit :])

    def replace(self, lines: Sequence[Line]) -> None:
        """Write these lines in place of all."""
        write_whole(self._path, "".join(f"\n{_text(line)}" for line in lines))
        self._count = len(lines)


def _text(line: Line) -> str:
    return json.dumps(line, allow_nan=False, separators=(",", ":"))
