"""What other threads have to tell an engine, kept until it can be told."""

import threading
from collections import deque

from ..engine.engine import Engine
from ..engine.request import Request


class Inbox:
    """What one other thread tells a driver: who comes, who has gone, and when to stop."""

    def __init__(self) -> None:
        self.stopped = False
        self._notes: deque[Request | int] = deque()  # a request that comes, the index of one whose client has gone
        self._num_sent = self._num_taken = 0  # requests
        self._news = threading.Event()

    @property
    def num_requests(self) -> int:
        """Requests that the engine has not been given."""
        return self._num_sent - self._num_taken

    def submit(self, request: Request) -> None:
        """Hand over a request that fits; requests come in order of arrival and of index."""
        self._num_sent += 1
        self._notes.append(request)
        self._news.set()

    def cancel(self, request: int) -> None:
        """Nobody waits for this request any more."""
        self._notes.append(request)
        self._news.set()

    def stop(self) -> None:
        """End after the step in flight, and those that only requests which are over have left."""
        self.stopped = True
        self._news.set()

    def deliver(self, engine: Engine, now: float) -> None:
        """Tell an engine what has come by `now`, in order."""
        self._news.clear()
        while self._notes:
            first = self._notes[0]
            if isinstance(first, int):
                engine.cancel(first, now)
            elif first.arrival <= now:
                engine.submit(first)
                self._num_taken += 1
            else:
                break
            self._notes.popleft()

    def wait(self) -> None:
        """Return when there is something that was not delivered."""
        if not self._notes and not self.stopped:
            self._news.wait()
