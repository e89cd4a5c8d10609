"""Lines of JSON, one for each piece of work that is finished: what a killed run goes on from; and a folder of them."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from ..files.place import Kind, Taken
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


class LedgerFolder:
    """An output folder whose ledger, `kind.kept`, has a line by its `key` for all that is finished; None keeps nothing.

    An entry is on the disk before the work goes on. One run at a time holds the folder, until it is closed. One that
    `force` replaces is put back where nothing is finished.
    """

    def __init__(self, folder: Path | None, kind: Kind, check: Callable[[str, bytes], Json], *, force: bool) -> None:
        self.entries: dict[str, Json] = {}
        self.folder = folder
        self._kind, self._check, self._force = kind, check, force
        self._taken: Taken | None = None
        self._ledger: Ledger | None = None
        if folder is not None and folder.is_dir() and not force:
            self._open(folder)

    def begin(self) -> None:
        """Make the folder ready for more, and itself where it is not there."""
        if self.folder is not None:
            if self._ledger is None:
                self._open(self.folder)
            assert self._ledger is not None
            self._ledger.begin()

    def append(self, entry: Json) -> None:
        """A piece of work is finished."""
        if self._ledger is not None and self._taken is not None:
            self._ledger.append(entry)
            self._taken.settle()

    @property
    def is_settled(self) -> bool:
        """Whether there is a folder to write results to, and nothing to be put back in its place."""
        return self._taken is not None and self._taken.is_settled

    def close(self) -> None:
        """Let go of the folder."""
        for held in (self._ledger, self._taken):
            if held is not None:
                held.close()

    def _open(self, folder: Path) -> None:
        self._taken = Taken(folder, self._kind, force=self._force)
        try:
            assert self._kind.kept is not None
            self._ledger = Ledger(folder / self._kind.kept, self._check)
        except BaseException:
            self.close()
            raise
        self.entries = {entry["key"]: entry for entry in self._ledger.entries}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
