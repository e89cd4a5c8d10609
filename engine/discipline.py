"""Asking a discipline: its answers about one decision, checked."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import PolicyError, cut
from .part import Discipline, Policy
from .state import NEVER, Draws
from .unmasking import array_of
from .view import View

HELD = 3  # column of Replica.queue
EMPTY_STEP = 1e-3  # s between decisions that let nothing run, as in vLLM (v1/engine/core.py:1693 of 0.33.0)
MOST_WITHHELD = 60.0  # s of them in a row


def ask_from(discipline: Discipline) -> int:
    """Waiting requests from which its answers matter."""
    if not discipline.questions:
        return NEVER
    if discipline.questions <= {"order"}:
        return 2
    return int(discipline.questions <= {"order", "holds", "most_admitted", "steps"})


class Decision(NamedTuple):
    """Answers about one decision; None: not a question of the discipline."""

    order: npt.NDArray[np.int64] | None = None
    holds: npt.NDArray[np.bool_] | None = None
    most_admitted: int | None = None
    most_prompt_tokens: int | None = None
    rests: npt.NDArray[np.bool_] | None = None
    steps: npt.NDArray[np.int64] | None = None
    steps_now: npt.NDArray[np.int64] | None = None


NUMBERS = ("most_admitted", "most_prompt_tokens")  # the other answers are arrays, of which
OF_WAITING, MARKS = ("order", "holds", "steps"), ("holds", "rests")  # are [waiting], not [running]; are bool, not whole


def ask(policy: Policy, view: View) -> Decision:
    """The discipline's answers; PolicyError for an impossible one. `order` is asked if two requests wait."""
    discipline = policy.discipline
    answers: dict[str, Any] = {}
    for name in sorted(discipline.questions):
        source = f"policy {policy.name}: {type(discipline).__name__}.{name}"
        rows = view.num_waiting if name in OF_WAITING else view.num_running
        if name in NUMBERS:
            number = getattr(discipline, name)(view)
            if not isinstance(number, int | np.integer) or number < 0:
                raise PolicyError(f"{source} returned {cut(number)}, expected a whole number of at least 0")
            answers[name] = int(number)
            continue
        if rows <= (name == "order"):
            continue
        answer = array_of(getattr(discipline, name)(view), source, np.bool_ if name in MARKS else np.int64, (rows,))
        if name == "order" and not np.array_equal(np.sort(answer), np.arange(rows)):
            raise PolicyError(f"{source} returned {cut(answer.tolist())}, expected 0 to {rows - 1}, each once")
        if name in ("steps", "steps_now") and answer.min() < 1:
            raise PolicyError(f"{source} returned {answer.min()}, expected at least 1")
        answers[name] = answer
    return Decision(**answers)


class Caps:
    """Most denoising steps of canvases, which a discipline's decision sets from its step on.

    ahead: decisions are made a step ahead.
    """

    def __init__(self, ahead: bool) -> None:
        self._ahead = ahead
        self._admitted: list[tuple[int, int]] = []  # request that waits, and steps
        self._step: list[tuple[int, int]] = []  # ... of the step that begins
        self._next: list[tuple[int, int]] = []
        self._limits: dict[int, int] = {}  # request -> its own, by the law and the trace

    def decided(self, decision: Decision, waiting: npt.NDArray[np.int32], running: npt.NDArray[np.int32]) -> None:
        """Note a decision about these requests, [waiting] and [running]."""
        self._admitted += _pairs(waiting, decision.steps)
        caps = _pairs(running, decision.steps_now)
        self._step, self._next = self._next, caps
        if not self._ahead:
            self._step = caps

    def apply(self, draws: Draws) -> None:
        """Limit the draws of requests that wait, and of the step that begins."""
        for request, steps in (*self._admitted, *self._step):
            limits = draws.requests["most"]
            limits[request] = min(self._limits.setdefault(request, int(limits[request])), steps)
        self._admitted = []


def _pairs(requests: npt.NDArray[np.int32], steps: npt.NDArray[np.int64] | None) -> list[tuple[int, int]]:
    if steps is None:
        return []
    return list(zip(requests.tolist(), steps.tolist(), strict=True))
