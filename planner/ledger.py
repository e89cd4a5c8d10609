"""Lines of JSON in a file, one for each piece of work that is finished: what a killed run goes on from."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..files.read import MOST_OF_SETTINGS, naming
from ..files.write import sync_folder

Json = dict[str, Any]


class Ledger:
    """The file, whose lines are read as it is opened and added to as work is finished. Its folder is the caller's lock.

    check: makes an entry of a line, given where it stands; it raises a DsimError for one that it does not know.
    """

    def __init__(self, path: Path, check: Callable[[str, bytes], Json]) -> None:
        self.entries: list[Json] = []
        self.path = path
        self._file: BinaryIO | None = None
        self._read(check)

    def begin(self) -> None:
        """Open it for adding."""
        with naming(self.path):
            self._file = self.path.open("ab")
        sync_folder(self.path.parent)

    def append(self, entry: Json) -> None:
        """A piece of work is finished: it is on the disk when this returns."""
        assert self._file is not None, "the ledger was not begun"
        with naming(self.path):
            self._file.write(json.dumps(entry, allow_nan=False, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """No more is added."""
        if self._file is not None:
            with suppress(OSError):  # of a full disk: it was told as the line was written
                self._file.close()

    def _read(self, check: Callable[[str, bytes], Json]) -> None:
        """The finished work; a line that a crash tore off is dropped, and its work done again."""
        if not self.path.is_file():
            return
        end = 0
        with naming(self.path), self.path.open("r+b") as file:
            for i, line in enumerate(iter(lambda: file.readline(MOST_OF_SETTINGS), b""), 1):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                self.entries.append(check(f"{self.path}:{i}", line))
            file.truncate(end)
