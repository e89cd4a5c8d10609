"""Answers one question at a time in another process, within a time limit, so that following never waits."""

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..engine.errors import DsimError, cut
from ..files.read import read_bytes

Answer = dict[str, Any]  # JSON; {"error": ...} if there is none
Question = Callable[..., Answer]
FILE = "answer.json"
ORPHAN = 1.0  # s between checks that the parent process runs


class Inline:
    """Answers at once, in this process."""

    busy = False

    def __init__(self) -> None:
        self._answer: Answer | None = None

    def start(self, question: Question, *of: Any) -> None:
        """Ask a question."""
        self._answer = _answered(question, of)

    def poll(self) -> Answer | None:
        """The answer, once; None if there is none."""
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        """Do nothing: there is no process to stop."""


class Background:
    """Answers in another process, which ends with this one, or after `limit` s."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._process: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._begun = 0.0

    @property
    def busy(self) -> bool:
        """Whether a question is being answered, or its answer has not been polled."""
        return self._process is not None

    def start(self, question: Question, *of: Any) -> None:
        """Ask a question. Its answer travels as a file."""
        from joblib.externals.loky.backend import get_context  # imported here, as elsewhere: it takes long

        assert self._process is None, "one question at a time"
        self._folder = tempfile.TemporaryDirectory()
        # Loky's process does not run the caller's main module again.
        self._process = get_context("loky").Process(
            target=_answer, args=(self._folder.name, os.getpid(), question, of), daemon=True
        )
        self._process.start()
        self._begun = time.monotonic()

    def poll(self) -> Answer | None:
        """The answer, once; None while there is none."""
        if self._process is None or self._folder is None:
            return None
        answer: Answer
        if self._process.is_alive():
            if time.monotonic() - self._begun <= self._limit:
                return None
            answer = {"error": f"it took more than {self._limit:g} s"}
        elif self._process.exitcode:
            answer = {"error": f"its process ended with code {self._process.exitcode}"}
        else:
            answer = json.loads(read_bytes(Path(self._folder.name) / FILE))
        self.close()
        return answer

    def close(self) -> None:
        """Stop the current question."""
        if self._process is None or self._folder is None:
            return
        self._process.terminate()
        self._process.join()
        self._folder.cleanup()
        self._process = self._folder = None


def _answered(question: Question, of: tuple[Any, ...]) -> Answer:
    try:
        return question(*of)
    except DsimError as error:
        return {"error": cut(error)}


def _answer(folder: str, parent: int, question: Question, of: tuple[Any, ...]) -> None:
    """Answer in this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    (Path(folder) / FILE).write_text(json.dumps(_answered(question, of), allow_nan=False), encoding="utf-8")
