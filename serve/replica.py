"""A replica behind a server: one engine, and the thread that drives it."""

import threading
from collections.abc import Callable

from ..engine.engine import Engine
from ..engine.journal import StepRecorder
from ..engine.loop import Executor
from .driver import Clock, Told, drive
from .inbox import Inbox


class Replica:
    """Requests go into its inbox; `ended` is called in its thread when it serves no more, with `failure` set."""

    def __init__(
        self, engine: Engine, executor: Executor, clock: Clock, told: Told, ended: Callable[[], None],
        recorder: StepRecorder | None = None,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.inbox = Inbox()
        self.failure: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(executor, clock, told, ended, recorder), name=f"replica-{engine.replica}",
            daemon=True,
        )  # fmt: skip

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return self.inbox.num_requests + self.engine.num_waiting

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive() and not self.inbox.stopped

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step in flight; what is unfinished stays so."""
        self.inbox.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(
        self, executor: Executor, clock: Clock, told: Told, ended: Callable[[], None], recorder: StepRecorder | None
    ) -> None:
        try:
            drive(self.engine, executor, self.inbox, clock, told, recorder)
        except Exception as error:  # what is done is not lost: the server writes its journal, then says this
            self.failure = error
        self.inbox.stop()
        ended()  # before the journal: no client waits for a disk
        if recorder is not None:
            recorder.flush()
