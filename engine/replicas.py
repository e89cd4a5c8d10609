"""Replicas of one setting side by side: one compiled call runs all that are due."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import core
from .engine import STEPS_A_CALL, Engine
from .histogram import NUM_BINS
from .journal import NO_JOURNAL, StepRecorder, StepTotals
from .numba_parts import states
from .state import COUNTERS, GAP_BINS, NO_INBOX, STEP_BINS, Cost, Draws, Inbox, read_only

FIGURES = 2  # padded to this number, so that routers of one or two figures share a compiled loop


class Replicas:
    """The engines of equal replicas. Their counters share an array, their time histograms are one.

    due: [places] when each runs again (s): a step ends, or a request came while idle; else infinity.
    """

    def __init__(self) -> None:
        self.engines: list[Engine | None] = []  # by place
        self.due: npt.NDArray[np.float64] = np.zeros(0)
        self.counters: npt.NDArray[Any] = np.zeros(0, COUNTERS)
        self._zeros: npt.NDArray[Any] = np.zeros(0, COUNTERS)
        self._bins: npt.NDArray[np.int64] = np.zeros((2, NUM_BINS), np.int64)  # as Replica.bins
        self._states: Any = states(0)
        self._places = np.zeros(0, np.int64)  # that take requests; at first the driver hands over each
        self._figures: tuple[str, ...] = ()  # names of counters; `route.least_loaded` chooses by their sum
        self._inbox = NO_INBOX
        self._cursor = np.zeros(1, np.int64)  # core._serve
        self._run: Any = None  # compiled core.serve; below core.keep_state
        self._keep: Any = None

    def add(self, engine: Engine) -> int:
        """Add an engine; returns its place."""
        if None not in self.engines:
            self.engines.append(None)
        place = self.engines.index(None)
        self.engines[place] = engine
        if place == len(self.due):
            self._make_places(max(16, 2 * place))
        self._join(place, engine)
        return place

    def remove(self, place: int) -> None:
        """Release an engine; it keeps its counters."""
        engine = self.engines[place]
        assert engine is not None, "there is none"
        engine.join(self.counters[place : place + 1].copy(), self._bins, lambda state: None)
        self.engines[place], self.counters[place], self.due[place] = None, np.zeros((), COUNTERS), np.inf

    def take(self, inbox: Inbox, figures: tuple[str, ...]) -> None:
        """Have `run`, not the driver, hand these requests of the table to replicas as they come.

        figures: counters whose least sum chooses the replica (`route.least_loaded`).
        """
        self.take_by([engine for engine in self.engines if engine is not None])
        self._figures = figures
        self._inbox = Inbox(*(read_only(column) for column in inbox))
        self._cursor[:] = 0
        self._run = None  # compiled for another way to choose

    def take_by(self, engines: Sequence[Engine]) -> None:
        """Have these replicas take requests from now on, in this order."""
        self._places = self.places(engines)

    @property
    def num_taken(self) -> int:
        """Requests taken so far."""
        return int(self._cursor[0])

    @property
    def more_come(self) -> bool:
        """Whether requests are still to come or wait."""
        return self.num_taken < len(self._inbox.times)

    def run(
        self, now: float, horizon: float, draws: Draws | tuple[Draws, ...], cost: Cost, recorder: StepRecorder | None
    ) -> bool:
        """`Engine.run` for each replica due before the horizon, or now; False: call again to continue.

        A call takes at most STEPS_A_CALL requests, and as many steps of a replica.
        """
        first = next((engine for engine in self.engines if engine is not None), None)
        if first is None:
            return True
        inbox = self._inbox
        if not len(self._places):
            inbox = NO_INBOX
        columns = [self.counters[figure] for figure in self._figures]
        columns += [self._zeros["expected_tokens"]] * (FIGURES - len(self._figures))
        group = core.Group(
            states=self._states,
            due=self.due,
            places=self._places,
            figures=tuple(columns),
            inbox=inbox,
            cursor=self._cursor,
        )
        arguments = group, *first.state, draws, cost
        if self._run is None:
            self._run = first.core.entry("serve", *arguments, NO_JOURNAL, core.Span(0.0, 0.0, 0, False))
        limit = self.num_taken + STEPS_A_CALL
        while True:
            journal = NO_JOURNAL
            if recorder is not None:
                journal = recorder.journal
            span = core.Span(now, horizon, limit - self.num_taken, False)
            code = self._run(*arguments, journal, span)
            if code < 0:
                return True
            place, reason = divmod(int(code), core.REASONS)
            if reason == core.PAUSED:
                return False  # by `core._serve` as place 0, where no replica need be
            engine = self.engines[place]
            assert engine is not None
            goes_on = engine.goes_on(reason, recorder, draws)
            self.due[place] = engine.clock
            if not goes_on or self.num_taken >= limit:
                return False

    def add_bins(self, totals: StepTotals) -> None:
        """Add times of all steps and gaps, of released engines too; engines' own totals have the rest."""
        totals.step_latency.counts += self._bins[STEP_BINS]
        totals.itl.counts += self._bins[GAP_BINS]

    def close(self) -> None:
        """Release all engines and their memory."""
        self.engines.clear()

    def places(self, engines: Sequence[Engine]) -> npt.NDArray[np.int64]:
        place_of = {id(engine): place for place, engine in enumerate(self.engines)}
        return np.array([place_of[id(engine)] for engine in engines], np.int64)

    @property
    def num_completed(self) -> int:
        """Requests finished by current replicas."""
        return int(self.counters["completed"].sum())

    @property
    def clock(self) -> float:
        """The latest time reached by a replica (s)."""
        return float(self.counters["clock"].max())

    def _make_places(self, count: int) -> None:
        old = len(self.due)
        due, counters = np.full(count, np.inf), np.zeros(count, COUNTERS)
        due[:old], counters[:old] = self.due, self.counters
        self.due, self.counters, self._states = due, counters, states(count)
        self._zeros = np.zeros(count, COUNTERS)
        for place, engine in enumerate(self.engines[:old]):
            if engine is not None:
                self._join(place, engine)

    def _join(self, place: int, engine: Engine) -> None:
        if self._keep is None:
            self._keep = engine.core.entry("keep_state", self._states, 0, *engine.state)
        engine.join(self.counters[place : place + 1], self._bins, lambda state: self._keep(self._states, place, *state))
