"""Logs and message streams that listen to a replica's steps and sent tokens."""

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
    queued: Sequence[int]  # prompt tokens of each waiting request
    begun: Sequence[tuple[int, float]]  # requests in their first step, and when they reached the engine
    emitted: Mapping[int, int]  # tokens sent, by request
    over: frozenset[int]  # ended requests


class Listener(Protocol):
    """Called by a replica's thread."""

    def step(self, ended: EndedStep) -> None:
        """Write a step."""

    def emptied(self, at_once: bool) -> None:
        """The prefix cache was emptied: write it at once or with the next step."""

    def close(self) -> None:
        """Flush and close."""


class Listeners:
    """The listeners of one replica. One that fails is dropped; serving continues."""

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
