"""Disciplines of the oracles' scenarios: the engine's scheduler and dsim's preset are asked the same ones."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsim.policy import Discipline, View

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
ANY = 2**30  # tokens: no limit


@dataclass(frozen=True)
class ShortestFirst(Discipline):
    """The shortest expected answer first; a step of waiting weighs as much as half a token."""

    def order(self, view: View) -> Ints:
        waiting = view.waiting()
        return np.argsort(waiting.estimate - waiting.emitted - waiting.age / 2, kind="stable")


@dataclass(frozen=True)
class FittingPrompts(Discipline):
    """Prompts longer than the free pages wait while others run."""

    def holds(self, view: View) -> Bools:
        free = (view.num_pages - view.pages_held) * int(view.fields.page_size)
        return (view.waiting().prompt > free) & (view.num_running > 0)


@dataclass(frozen=True)
class OneAtATime(Discipline):
    """A decision admits one request at most."""

    def most_admitted(self, view: View) -> int:
        return 1


@dataclass(frozen=True)
class FewPromptTokens(Discipline):
    """While requests run, a step computes few tokens of prompts."""

    def most_prompt_tokens(self, view: View) -> int:
        return 12 if view.num_running else ANY


@dataclass(frozen=True)
class RestInTurn(Discipline):
    """Of several running requests, every other rests, at the next step the others."""

    def rests(self, view: View) -> Bools:
        places = np.arange(view.num_running)
        return ((places + int(view.now)) % 2 == 1) & (view.num_running > 1)


@dataclass(frozen=True)
class StepsFromAdmission(Discipline):
    """Admits requests for one to five denoising steps a canvas, by their number and the rows."""

    def steps(self, view: View) -> Ints:
        return 1 + (view.waiting().index + view.num_running) % 5


@dataclass(frozen=True)
class StepsOfRunning(Discipline):
    """The canvases of running requests may take one to five denoising steps, other ones at each step."""

    def steps_now(self, view: View) -> Ints:
        return 1 + (view.running().index + int(view.now)) % 5


@dataclass(frozen=True)
class AllSteps(StepsFromAdmission, StepsOfRunning):
    """Both caps of canvases."""


@dataclass(frozen=True)
class AllOfThem(ShortestFirst, FittingPrompts, OneAtATime, FewPromptTokens, RestInTurn):
    """All answers in one decision, but caps of canvases."""


@dataclass(frozen=True)
class AllAndSteps(AllOfThem, AllSteps):
    """All answers in one decision."""


SHORTEST, FITTING, SINGLY, PROMPTS, REST, ALL = (
    ShortestFirst(), FittingPrompts(), OneAtATime(), FewPromptTokens(), RestInTurn(), AllOfThem(),
)  # fmt: skip
ADMISSION, RUNNING, STEPS, ALL_STEPS = StepsFromAdmission(), StepsOfRunning(), AllSteps(), AllAndSteps()
