"""Disciplines of the benchmark, besides that of examples/policies/dws.py."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsim.policy import Discipline, View

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DeadlineFirst(Discipline):
    """The earliest deadline first."""

    def order(self, view: View) -> Ints:
        return np.argsort(view.waiting().deadline, kind="stable")


@dataclass(frozen=True)
class ByPages(Discipline):
    """Requests wait until the pages of their prompts and estimated answers are free of all running requests' own."""

    def holds(self, view: View) -> Bools:
        waiting, running = view.waiting(), view.running()
        page = int(view.fields.page_size)
        free = view.num_pages - int(pages(running.prompt, running.estimate, page).sum())
        blocked = np.cumsum(pages(waiting.prompt, waiting.estimate, page)) > free
        if view.num_running == 0:  # it runs alone, if need be
            blocked[:1] = False
        return blocked


def pages(prompt: Ints, estimate: Ints, page: int) -> Ints:
    return -(-(prompt + estimate) // page)


@dataclass(frozen=True)
class FewerSteps(Discipline):
    """A canvas of a running request may take 12 denoising steps, and two less for each waiting request, down to 2."""

    def steps_now(self, view: View) -> Ints:
        return np.full(view.num_running, max(2, 12 - 2 * view.num_waiting))


@dataclass(frozen=True)
class FewerStepsFromAdmission(Discipline):
    """A request is admitted for 12 denoising steps a canvas, and two less for each waiting request, down to one."""

    def steps(self, view: View) -> Ints:
        return np.full(view.num_waiting, max(1, 12 - 2 * view.num_waiting))


@dataclass(frozen=True)
class ShortPrompts(Discipline):
    """A quarter of the prompt tokens for each running request less; the row with most to come rests if many wait."""

    def most_prompt_tokens(self, view: View) -> int:
        return 32 * max(1, 4 - view.num_running)

    def rests(self, view: View) -> Bools:
        running = view.running()
        resting = np.zeros(view.num_running, np.bool_)
        if view.num_waiting > 3 and view.num_running > 1:
            resting[np.argmax(running.estimate - running.emitted)] = True
        return resting


DEADLINE, PAGES, STEPS, ADMISSION, PROMPTS = (
    DeadlineFirst(), ByPages(), FewerSteps(), FewerStepsFromAdmission(), ShortPrompts(),
)  # fmt: skip
