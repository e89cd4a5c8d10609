"""A recorded run's commits, for another schedule of the same requests.

A masked position commits at the same count of its evaluations.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..engine.journal import unpack
from ..engine.part import Policy
from ..engine.state import MASKED
from ..engine.step import Phase, StepOutcome, StepPlan
from ..profiler.samples import Bools, Ints
from ..results.run import Columns
from .steps import Journal

UNKNOWN = -1


@dataclass(frozen=True, eq=False)
class _Canvas:
    """A request's block or canvas in an engine's log."""

    begin: int  # position
    masks: Bools
    evaluations: npt.NDArray[np.int32]


class Commits:
    """By request and position: evaluations as a mask before the committing one; the median if never committed.

    A row that computes masks commits at least the one due first, except under a law or Dream's schedule.
    """

    def __init__(self, requests: Columns, policy: Policy, width: int) -> None:
        block_length = policy.block_length
        self._commits_tokens, self._on_a_grid = policy.rows.commits == "tokens", policy.granularity.on_a_grid
        self._may_wait = policy.unmasking.strategy in ("law", "entropy")
        self._columns = np.arange(width)
        size = int(requests["request"].max(initial=-1)) + 1
        prompt, end = np.zeros(size, np.int64), np.zeros(size, np.int64)
        prompt[requests["request"]] = requests["input_length"]
        end[requests["request"]] = requests["input_length"] + requests["max_tokens"]
        # The block of the prompt's end decodes first.
        first = -(-np.maximum(prompt, 1) // block_length) * block_length - block_length
        room = end - first + block_length + width
        self._base = np.concatenate([[0], np.cumsum(room)[:-1]]) - first
        self._due = np.full(int(room.sum()), UNKNOWN, np.int32)
        # Rows with masks, of these without a due commit, masks, of these without a record.
        self.counts = np.zeros(4, np.int64)

    def record(self, plan: StepPlan, outcome: StepOutcome) -> None:
        committed = outcome.committed
        if not self._commits_tokens:
            self._due[self._indices(plan)[committed]] = plan.evaluations[committed]

    def record_log(self, journal: Journal, block_length: int) -> None:
        """Record an engine's log, which has no plans."""
        lists = journal.lists
        if self._commits_tokens:
            return
        phases, rows, tokens = (lists[name][0] for name in ("phases", "requests", "num_tokens"))
        marks = [unpack(lists[name][0].reshape(len(rows), -1), block_length) for name in ("window", "commits")]
        requests = journal.requests
        prompts = dict(zip(requests["request"].tolist(), requests["input_length"].tolist(), strict=True))
        canvases: dict[int, _Canvas] = {}
        widths: dict[int, int] = {}  # of the last committed canvas
        for row, (request, window, commits) in enumerate(zip(rows.tolist(), *marks, strict=True)):
            canvas, phase = canvases.get(request), phases[row]
            if not self._on_a_grid and phase == Phase.FLUSH:  # the step's budget may cut the canvas
                widths[request] = int(tokens[row])
            elif not self._on_a_grid and phase == Phase.PREFILL and canvas is not None:
                canvas.evaluations[:] = 0  # preempted: the canvas restarts
            if phase != Phase.DENOISE:
                continue
            if canvas is None or not canvas.masks.any():
                begin = prompts[request]
                if canvas is not None:
                    begin = canvas.begin + widths.get(request, block_length)
                elif self._on_a_grid:
                    begin = begin // block_length * block_length
                masks = np.arange(begin, begin + block_length) >= prompts[request]
                canvas = canvases[request] = _Canvas(begin, masks, np.zeros(block_length, np.int32))
            done = np.flatnonzero(commits & canvas.masks)
            self._due[self._base[request] + canvas.begin + done] = canvas.evaluations[done]
            canvas.evaluations[window & canvas.masks] += 1
            canvas.masks[done] = False

    def of(self, plan: StepPlan) -> Bools:
        """Committed positions, [rows, width]."""
        if self._commits_tokens:
            return plan.window.copy()
        masks = plan.window & (plan.status == MASKED)
        due = self._due[self._indices(plan)]
        unknown = masks & (due == UNKNOWN)
        wait = np.where(unknown, self._typical, due) - plan.evaluations.astype(np.int64)
        committed: Bools = masks & (wait <= 0)
        has_masks = masks.any(axis=1)
        forced = np.flatnonzero(has_masks & ~committed.any(axis=1) & (not self._may_wait))
        if len(forced):
            soonest = np.where(masks[forced], wait[forced], np.iinfo(np.int64).max).argmin(axis=1)
            committed[forced, soonest] = True
        self.counts += (has_masks.sum(), len(forced), masks.sum(), unknown.sum())
        return committed

    def _indices(self, plan: StepPlan) -> Ints:
        """[rows, width] places in `_due`."""
        begins: Ints = self._base[plan.requests] + plan.block_start
        return begins[:, None] + self._columns

    @cached_property
    def _typical(self) -> int:
        """The median evaluation of all records."""
        recorded = self._due[self._due != UNKNOWN]
        return int(np.median(recorded if len(recorded) else [0]))
