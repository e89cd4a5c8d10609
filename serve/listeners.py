"""Listeners of a replica's steps, with the tokens sent: logs and message streams."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..engine.engine import Engine
from ..engine.step import StepOutcome, StepPlan

_log = logging.getLogger("dsim.serve")


@dataclass(frozen=True, slots=True)
class EndedStep:
    engine: Engine
    plan: StepPlan
    outcome: StepOutcome
    end: float  # s
    device: float  # s of device work
    queued: Sequence[int]  # prompt tokens of waiting requests
    begun: Sequence[tuple[int, float]]  # requests in a step for the first time, and when they reached the engine
    emitted: Mapping[int, int]  # tokens sent, by request
    over: frozenset[int]  # requests that ended


class Listener(Protocol):
    """A log or message stream; a replica's thread calls it."""

    def step(self, ended: EndedStep) -> None:
        """Write a step."""

    def emptied(self, at_once: bool) -> None:
        """Write that the prefix cache was emptied, at once or with the next step."""

    def close(self) -> None:
        """Flush and close."""


class Listeners:
    """The listeners of one replica. A listener that fails is dropped, and serving continues."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self._listeners = list(listeners)

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def step(self, ended: EndedStep) -> None:
        self._each(lambda listener: listener.step(ended))

    def emptied(self, at_once: bool) -> None:
        self._each(lambda listener: listener.emptied(at_once))

    def _each(self, write: Callable[[Listener], None]) -> None:
        for listener in list(self._listeners):
            try:
                write(listener)
            except Exception as error:
                self._listeners.remove(listener)
                _log.error("the %s records no more steps; serving continues: %s", listener, error)

    def close(self) -> None:
        for listener in self._listeners:
            try:
                listener.close()
            except Exception as error:
                _log.error("the end of the %s is missing: %s", listener, error)
        self._listeners = []
