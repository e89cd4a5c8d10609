"""An append-only store of lines in a folder, bounded on disk: the oldest lines go first."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files.read import json_of, naming, read_bytes

SEGMENTS = 8  # files of a store; the oldest is dropped whole


class Lines:
    """JSON objects, one a line, in numbered files of one folder.

    A line is written at once, then synced. A kill can cut the last line short: reading skips it, and the next append
    removes it. So a kill loses at most the line that was being written.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._most_of_file = max(1, limit // SEGMENTS)  # bytes
        with naming(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every whole line, the oldest first."""
        return iter(list(self.newest())[::-1])

    def newest(self) -> Iterator[dict[str, Any]]:
        """Every whole line, the newest first."""
        for path in reversed(self.files):
            for line in reversed(read_bytes(path).split(b"\n")):
                with suppress(ValueError):
                    value = json_of(line)
                    if isinstance(value, dict):
                        yield value

    @property
    def files(self) -> list[Path]:
        """The files, the oldest first."""
        return sorted(self._folder.glob("[0-9]*.jsonl"))

    def append(self, value: dict[str, Any]) -> None:
        """Add a line, and drop the oldest file if the store has become too large."""
        data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        files = self.files
        path = files[-1] if files else self._folder / "00000001.jsonl"
        with naming(path):
            if files and path.stat().st_size + len(data) > self._most_of_file:
                path = self._folder / f"{int(path.stem) + 1:08d}.jsonl"
                files.append(path)
            with open(path, "ab+") as file:
                _end_line(file)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            for old in files[:-SEGMENTS]:
                old.unlink(missing_ok=True)


def _end_line(file: Any) -> None:
    """Remove a line that a kill cut short."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
