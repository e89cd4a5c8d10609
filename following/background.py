"""Answers one question at a time in another process, within a time limit, so that following never waits."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from ..engine.errors import DsimError, cut

Answer = dict[str, Any]  # JSON; {"error": ...} if there is none
ORPHAN = 1.0  # s between checks that the parent process runs


class Background:
    """Answers in another process, which ends with this one, or after `limit` s."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._executor: Any = None
        self._answer: Any = None  # a future
        self._begun = 0.0

    @property
    def busy(self) -> bool:
        """Whether a question is being answered, or its answer has not been polled."""
        return self._answer is not None

    def start(self, question: Callable[..., Answer], *arguments: Any) -> None:
        """Ask a question."""
        from joblib.externals.loky import ProcessPoolExecutor  # imported here, as elsewhere: it takes long

        assert not self.busy, "one question at a time"
        # Loky's process does not run the caller's main module again.
        self._executor = ProcessPoolExecutor(1, initializer=_end_with, initargs=(os.getpid(),))
        self._answer = self._executor.submit(question, *arguments)
        self._begun = time.monotonic()

    def poll(self) -> Answer | None:
        """The answer, once; None while there is none."""
        if self._answer is None:
            return None
        late = time.monotonic() - self._begun > self._limit
        if not late and not self._answer.done():
            return None
        answer: Answer = {"error": f"it took more than {self._limit:g} s"}
        if self._answer.done():
            answer = _result(self._answer)
        self.close()
        return answer

    def close(self) -> None:
        """Stop the current question."""
        if self._executor is not None:
            self._executor.shutdown(kill_workers=True)
        self._executor = self._answer = None


def _result(answer: Any) -> Answer:
    try:
        result: Answer = answer.result()
    except DsimError as error:
        return {"error": cut(error)}
    except Exception as error:  # the process was ended
        return {"error": f"its process failed: {cut(error)}"}
    return result


def _end_with(parent: int) -> None:
    """Leave Ctrl-C to the parent process, and end when it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
