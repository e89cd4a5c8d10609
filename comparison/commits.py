"""The commits of a recorded run, as a rule for any other schedule of the same requests.

A masked position commits at its n-th evaluation, wherever that evaluation falls: n is what the recorded run showed. So
is, where a policy evicts, at which of its evaluations it was evicted.
"""

import numpy as np
import numpy.typing as npt

from ..engine.journal import unpack
from ..engine.part import Policy
from ..engine.state import MASKED
from ..engine.step import Phase, StepOutcome, StepPlan
from ..results.run import Columns
from .steps import Lists

UNKNOWN = -1
MOST = 64  # evaluations of a mask that are remembered as evicted or not: a block takes no more steps

Bools = npt.NDArray[np.bool_]


class Commits:
    """By request and absolute position, how often it was computed as a mask before the step that committed it.

    A position that the recorded run never committed takes the median of all. A step commits at least one mask of a row
    that computes any, as every unmasking rule does but a law and Dream's schedule: where the record has none due, the
    one due soonest.
    """

    def __init__(self, requests: Columns, policy: Policy, width: int) -> None:
        block_length = policy.block_length
        self._commits_tokens, self._on_a_grid = policy.rows.commits == "tokens", policy.granularity.on_a_grid
        # A block commits whole in its last step, or by a schedule with steps of none.
        self._may_wait = policy.unmasking.strategy in ("law", "entropy")
        self._columns = np.arange(width)
        size = int(requests["request"].max(initial=-1)) + 1
        prompt, end = np.zeros(size, np.int64), np.zeros(size, np.int64)
        prompt[requests["request"]] = requests["input_length"]
        end[requests["request"]] = requests["input_length"] + requests["max_tokens"]
        # The block that a prompt ends in is the first to be decoded.
        first = -(-np.maximum(prompt, 1) // block_length) * block_length - block_length
        room = end - first + block_length + width
        self._base = np.concatenate([[0], np.cumsum(room)[:-1]]) - first
        self._due = np.full(int(room.sum()), UNKNOWN, np.int32)
        self._evicted: npt.NDArray[np.uint64] | None = None  # bit n: at the n-th evaluation
        self._typical: int | None = None
        self.num_rows = self.num_forced = self.num_looked_up = self.num_unknown = 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Rows that computed a mask, and of those with none due; masks looked up, and of those without an entry."""
        return self.num_rows, self.num_forced, self.num_looked_up, self.num_unknown

    def see(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Take down a recorded step."""
        if self._commits_tokens:
            return
        committed = outcome.committed
        self._due[self._at(plan)[committed]] = plan.evaluations[committed]
        if outcome.retained is not None:
            if self._evicted is None:
                self._evicted = np.zeros(len(self._due), np.uint64)
            evicted = plan.window & ~outcome.retained & (plan.evaluations < MOST)
            self._evicted[self._at(plan)[evicted]] |= np.uint64(1) << plan.evaluations[evicted].astype(np.uint64)

    def learn(self, requests: Columns, lists: Lists, block_length: int) -> None:
        """Take down the steps of an engine's log, of which there are no plans; the log tells of no eviction."""
        if self._commits_tokens:
            return
        phases, who = lists["phases"][0], lists["requests"][0]
        window, commits = (unpack(lists[name][0].reshape(len(who), -1), block_length) for name in ("window", "commits"))
        prompt = dict(zip(requests["request"].tolist(), requests["input_length"].tolist(), strict=True))
        left: dict[int, tuple[int, Bools, npt.NDArray[np.int32]]] = {}  # block's begin, its masks, their evaluations
        for row in np.flatnonzero(phases == Phase.DENOISE).tolist():
            request = int(who[row])
            if request not in left or not left[request][1].any():
                if request in left:
                    begin = left[request][0] + block_length
                else:
                    begin = prompt[request] // block_length * block_length if self._on_a_grid else prompt[request]
                masks = np.arange(begin, begin + block_length) >= prompt[request]
                left[request] = begin, masks, np.zeros(block_length, np.int32)
            begin, masks, seen = left[request]
            done = commits[row] & masks
            self._due[self._base[request] + begin + np.flatnonzero(done)] = seen[done]
            seen[window[row] & masks] += 1
            left[request] = begin, masks & ~done, seen

    def of(self, plan: StepPlan) -> tuple[Bools, Bools | None]:
        """The masks of a plan that commit, [rows, width], and what it retains where it may evict.

        Of an autoregressive plan everything commits.
        """
        if self._commits_tokens:
            return plan.window.copy(), None
        committed = self._commits(plan)
        if plan.evicting is None:
            return committed, None
        retained = plan.window.copy()
        if self._evicted is not None:
            times = np.minimum(plan.evaluations, MOST - 1).astype(np.uint64)
            evicted = (self._evicted[self._at(plan)] >> times) & np.uint64(1) == 1
            retained &= ~(evicted & (plan.status == MASKED) & (plan.evaluations < MOST)) | committed
        return committed, retained

    def _commits(self, plan: StepPlan) -> Bools:
        if self._typical is None:
            known = self._due[self._due != UNKNOWN]
            self._typical = int(np.median(known)) if len(known) else 0
        masks = plan.window & (plan.status == MASKED)
        due = self._due[self._at(plan)]
        unknown = masks & (due == UNKNOWN)
        wait = np.where(unknown, self._typical, due) - plan.evaluations.astype(np.int64)
        committed: Bools = masks & (wait <= 0)
        some = masks.any(axis=1)
        forced = np.flatnonzero(some & ~committed.any(axis=1) & (not self._may_wait))
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
