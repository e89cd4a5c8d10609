"""What a recorded run committed, as a rule for any other schedule of the same requests.

A masked position commits at its n-th evaluation, wherever that evaluation falls: n is what the recorded run showed.
"""

import numpy as np
import numpy.typing as npt

from ...engine.rows import MASKED
from ...engine.step import StepPlan
from ..run import Columns

UNKNOWN = -1


class Commits:
    """By request and absolute position, how often it was computed as a mask before the step that committed it.

    A position that the recorded run never committed takes the median of all. A step commits at least one mask of a row
    that computes any, as every unmasking rule does: where the record has none due, the one due soonest.
    """

    def __init__(self, requests: Columns, block_length: int, width: int, autoregressive: bool) -> None:
        self._autoregressive = autoregressive
        self._columns = np.arange(width)
        size = int(requests["request"].max(initial=-1)) + 1
        prompt, end = np.zeros(size, np.int64), np.zeros(size, np.int64)
        prompt[requests["request"]] = requests["input_length"]
        end[requests["request"]] = requests["input_length"] + requests["output_length"]
        # The block that a prompt ends in is the first to be decoded.
        first = -(-np.maximum(prompt, 1) // block_length) * block_length - block_length
        room = end - first + block_length + width
        self._base = np.concatenate([[0], np.cumsum(room)[:-1]]) - first
        self._due = np.full(int(room.sum()), UNKNOWN, np.int32)
        self._typical: int | None = None
        self.num_rows = self.num_forced = self.num_looked_up = self.num_unknown = 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Rows that computed a mask, and of those with none due; masks looked up, and of those without an entry."""
        return self.num_rows, self.num_forced, self.num_looked_up, self.num_unknown

    def see(self, plan: StepPlan, committed: npt.NDArray[np.bool_]) -> None:
        """Take down a recorded step."""
        if not self._autoregressive:
            self._due[self._at(plan)[committed]] = plan.evaluations[committed]

    def of(self, plan: StepPlan) -> npt.NDArray[np.bool_]:
        """The masks of a plan that commit, [rows, width]; of an autoregressive plan, everything."""
        if self._autoregressive:
            return np.ones_like(plan.window)
        if self._typical is None:
            known = self._due[self._due != UNKNOWN]
            self._typical = int(np.median(known)) if len(known) else 0
        masks = plan.window & (plan.status == MASKED)
        due = self._due[self._at(plan)]
        unknown = masks & (due == UNKNOWN)
        wait = np.where(unknown, self._typical, due) - plan.evaluations.astype(np.int64)
        committed: npt.NDArray[np.bool_] = masks & (wait <= 0)
        some = masks.any(axis=1)
        forced = np.flatnonzero(some & ~committed.any(axis=1))
        if len(forced):
            soonest = np.where(masks[forced], wait[forced], np.iinfo(np.int64).max).argmin(axis=1)
            committed[forced, soonest] = True
        self.num_looked_up += int(masks.sum())
        self.num_unknown += int(unknown.sum())
        self.num_rows += int(some.sum())
        self.num_forced += len(forced)
        return committed

    def _at(self, plan: StepPlan) -> npt.NDArray[np.int64]:
        at: npt.NDArray[np.int64] = (self._base[plan.requests] + plan.block_start)[:, None] + self._columns
        return at
