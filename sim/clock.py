"""Simulated time: SimPy's environment, with events at absolute times."""

import heapq
from collections.abc import Callable

import simpy
from simpy.events import NORMAL, URGENT


class Clock(simpy.Environment):
    """An environment that sets events at exact times.

    SimPy adds a delay to `now`, which may round. The engine computes the end of a step once, and it stays exact.
    """

    stopping = False  # the run ends before its next event, with KeyboardInterrupt

    def stop(self) -> None:
        """End the run before its next event."""
        self.stopping = True

    def step(self) -> None:
        """Process the next event; KeyboardInterrupt where `stop` was called, so a run never ends inside an event."""
        if self.stopping:
            raise KeyboardInterrupt
        super().step()

    def at(self, time: float, urgent: bool = False) -> simpy.Event:
        """An event at `time`. At equal times urgent events come first, so a step that begins sees an arrival."""
        assert time >= self.now, f"time would run backwards, from {self.now} to {time}"
        event = self.event()
        event._ok = True
        event._value = None
        heapq.heappush(self._queue, (time, URGENT if urgent else NORMAL, next(self._eid), event))
        return event

    def call(self, time: float, then: Callable[[], None]) -> None:
        """Call `then` at `time`, before a step that begins then."""
        callbacks = self.at(time, urgent=True).callbacks
        assert callbacks is not None
        callbacks.append(lambda _: then())
