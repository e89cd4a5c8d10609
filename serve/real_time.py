"""The server's clock: s since it opened, `speed` of them per real second."""

import math
import threading
import time

from ..engine.errors import DsimError

BEHIND = 0.05  # s of real time by which a replica may be late before the clock goes back


class Clock:
    """Simulated time that slows down where the machine is too slow for `speed`: it never runs ahead of a replica.

    So a step lasts as long as its profile predicts. With speed 1 and a real device it is an ordinary clock.
    """

    def __init__(self, speed: float = 1.0) -> None:
        if not 0 < speed < math.inf:
            raise DsimError(f"speed is {speed}, expected above 0 and finite")
        self.speed = speed
        self._lock = threading.Lock()
        self.start()

    def start(self) -> None:
        self.opened = time.time()  # s since 1970
        self._begin = time.monotonic()
        self._last = 0.0

    def __call__(self) -> float:
        """s; never decreases."""
        with self._lock:
            self._last = max(self._last, self._now())
            return self._last

    def real(self, seconds: float) -> float:
        """In seconds of real time."""
        return max(0.0, seconds / self.speed)

    def sleep_until(self, moment: float) -> None:
        """If `moment` is long past, set the clock back to it."""
        late = self._now() - moment
        if late < 0:
            time.sleep(self.real(-late))
        elif self.real(late) > BEHIND:
            with self._lock:
                self._begin += self.real(self._now() - moment) - BEHIND

    def _now(self) -> float:
        return (time.monotonic() - self._begin) * self.speed
