"""Simulated time: SimPy's environment, with events at absolute times."""

import heapq
from collections.abc import Callable

import simpy
from simpy.events import NORMAL, URGENT

# At equal times: an arrival, then a decision, which sees it, then a step, which sees both.
ARRIVAL, DECISION, STEP = URGENT, 0.5, NORMAL


class Clock(simpy.Environment):
    """Sets events at exact times.

    SimPy adds a delay to `now`, which may round; the engine computes a step's end once.
    """

    stopping = False  # the run ends before its next event

    def stop(self) -> None:
        """End the run before its next event, with KeyboardInterrupt."""
        self.stopping = True

    def step(self) -> None:
        """Process the next event, unless stopped: a run never ends inside an event."""
        if self.stopping:
            raise KeyboardInterrupt
        super().step()

    def at(self, time: float, priority: float = STEP) -> simpy.Event:
        """An event at `time`; at equal times the least priority comes first."""
        assert time >= self.now, f"time would run backwards, from {self.now} to {time}"
        event = self.event()
        event._ok = True
        event._value = None
        heapq.heappush(self._queue, (time, priority, next(self._eid), event))  # type: ignore[misc]
        return event

    def call(self, time: float, then: Callable[[], None]) -> None:
        """Call `then` at `time`, before a step that begins then."""
        callbacks = self.at(time, ARRIVAL).callbacks
        assert callbacks is not None
        callbacks.append(lambda _: then())
