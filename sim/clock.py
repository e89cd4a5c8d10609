"""Simulated time: SimPy's environment, with events at absolute times."""

import heapq

import simpy
from simpy.events import NORMAL, URGENT


class Clock(simpy.Environment):
    """An environment whose events can be set at an exact time.

    A delay is added to `now` and may round; a step's end is computed once, by the engine's clock, and kept as it is.
    """

    stopping = False  # the run ends before its next event, with KeyboardInterrupt

    def stop(self) -> None:
        """End the run before its next event, so that nothing is half done."""
        self.stopping = True

    def step(self) -> None:
        """Process the next event, unless the run is to stop: it is never left in the middle of one."""
        if self.stopping:
            raise KeyboardInterrupt
        super().step()

    def at(self, time: float, urgent: bool = False) -> simpy.Event:
        """An event at `time`. Of equal times urgent ones come first: a step that begins sees who arrives."""
        assert time >= self.now, f"time would run backwards, from {self.now} to {time}"
        event = self.event()
        event._ok = True
        event._value = None
        heapq.heappush(self._queue, (time, URGENT if urgent else NORMAL, next(self._eid), event))
        return event
