"""Answers one question at a time in another process, within a time limit, so that following never waits."""

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..engine.errors import DsimError, cut
from ..files.read import read_bytes

Found = dict[str, Any]  # JSON
Question = Callable[..., Iterator[Found]]
ORPHAN = 1.0  # s between checks that the parent process runs


class Inline:
    """Answers at once, in this process."""

    def __init__(self) -> None:
        self._found: list[Found] = []

    @property
    def busy(self) -> bool:
        return False

    def start(self, question: Question, *of: Any) -> None:
        """Ask a question."""
        self._found += _answers(question, of)

    def poll(self) -> list[Found]:
        """The findings since the last call."""
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        """Do nothing: there is no process to stop."""


class Background:
    """Answers in another process, which ends with this one, or after `limit` s."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._process: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._begun = 0.0
        self._read = 0  # bytes
        self._lock = threading.Lock()  # the port and the loop both poll

    @property
    def busy(self) -> bool:
        """Whether a question is being answered, or findings have not been polled."""
        return self._process is not None

    def start(self, question: Question, *of: Any) -> None:
        """Ask a question. It yields findings, which travel as JSON lines of a file."""
        from joblib.externals.loky.backend import get_context  # imported here, as elsewhere: it takes long

        with self._lock:
            if self._process is not None:
                raise DsimError("a question is being answered, expected one at a time")
            self._folder = tempfile.TemporaryDirectory()
            path = Path(self._folder.name) / "found.jsonl"
            path.touch()
            # Loky's process does not run the caller's main module again.
            self._process = get_context("loky").Process(
                target=_answer, args=(str(path), os.getpid(), question, of), daemon=True
            )
            self._process.start()
            self._begun, self._read = time.monotonic(), 0

    def poll(self) -> list[Found]:
        """The findings since the last call; {"error": ...} if the process failed."""
        with self._lock:
            if self._process is None or self._folder is None:
                return []
            late = time.monotonic() - self._begun > self._limit
            ended = not self._process.is_alive()
            lines = read_bytes(Path(self._folder.name) / "found.jsonl")[self._read :]
            whole = lines[: lines.rfind(b"\n") + 1]
            self._read += len(whole)
            found: list[Found] = [json.loads(line) for line in whole.splitlines()]
            if ended or late:
                if not ended:
                    found.append({"error": f"it took more than {self._limit:g} s"})
                elif self._process.exitcode:
                    found.append({"error": f"its process ended with code {self._process.exitcode}"})
                self._end()
            return found

    def close(self) -> None:
        """Stop the current question."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is None or self._folder is None:
            return
        self._process.terminate()
        self._process.join()
        self._folder.cleanup()
        self._process = self._folder = None


def _answers(question: Question, of: tuple[Any, ...]) -> Iterator[Found]:
    try:
        yield from question(*of)
    except DsimError as error:
        yield {"error": cut(error)}


def _answer(path: str, parent: int, question: Question, of: tuple[Any, ...]) -> None:
    """Answer in this process; write each finding as a line of JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN)
        shutil.rmtree(Path(path).parent, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    for found in _answers(question, of):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(found, allow_nan=False) + "\n")
