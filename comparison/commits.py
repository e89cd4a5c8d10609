"""A recorded run's commits, for another schedule of the same requests.

A masked position commits, or is evicted, at the same count of its evaluations.
"""

import numpy as np
import numpy.typing as npt

from ..engine.journal import unpack
from ..engine.part import Policy
from ..engine.state import MASKED
from ..engine.step import Phase, StepOutcome, StepPlan
from ..results.run import Columns
from .steps import Ints, Lists

UNKNOWN = -1
MOST = 64  # evaluations in which a mask may be evicted, a bit each

Bools = npt.NDArray[np.bool_]


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
        self._evicted: npt.NDArray[np.uint64] | None = None  # bit n: at evaluation n
        self._typical: int | None = None
        # Rows with masks, of these without a due commit, masks, of these without a record.
        self.counts = np.zeros(4, np.int64)

    def see(self, plan: StepPlan, outcome: StepOutcome) -> None:
        if self._commits_tokens:
            return
        committed = outcome.committed
        self._due[self._at(plan)[committed]] = plan.evaluations[committed]
        if outcome.retained is not None:
            if self._evicted is None:
                self._evicted = np.zeros(len(self._due), np.uint64)
            evicted = plan.window & ~outcome.retained & (plan.evaluations < MOST)
            self._evicted[self._at(plan)[evicted]] |= np.uint64(1) << plan.evaluations[evicted].astype(np.uint64)

    def learn(self, requests: Columns, lists: Lists, block_length: int) -> Ints:
        """Record an engine's log, which has no plans and no evictions.

        Returns the blocks completed by each step, [steps].
        """
        offsets = lists["requests"][1]
        if self._commits_tokens:
            return np.zeros(len(offsets) - 1, np.int64)
        phases, rows, tokens = (lists[name][0] for name in ("phases", "requests", "num_tokens"))
        window, commits = (
            unpack(lists[name][0].reshape(len(rows), -1), block_length) for name in ("window", "commits")
        )
        prompt = dict(zip(requests["request"].tolist(), requests["input_length"].tolist(), strict=True))
        left: dict[int, tuple[int, Bools, npt.NDArray[np.int32]]] = {}  # block's start, masks, their evaluations
        widths: dict[int, int] = {}  # of the last committed canvas
        ended = np.zeros(len(rows) + 1, np.int64)  # after each row
        for row in range(len(rows)):
            request = int(rows[row])
            if not self._on_a_grid and phases[row] == Phase.FLUSH:  # the step's budget may cut the canvas
                widths[request] = int(tokens[row])
            elif not self._on_a_grid and phases[row] == Phase.PREFILL and request in left:
                left[request][2][:] = 0  # preempted: the canvas restarts
            if phases[row] != Phase.DENOISE:
                continue
            if request not in left or not left[request][1].any():
                if request in left:
                    begin = left[request][0] + widths.get(request, block_length)
                else:
                    begin = prompt[request] // block_length * block_length if self._on_a_grid else prompt[request]
                masks = np.arange(begin, begin + block_length) >= prompt[request]
                left[request] = begin, masks, np.zeros(block_length, np.int32)
            begin, masks, seen = left[request]
            done = commits[row] & masks
            self._due[self._base[request] + begin + np.flatnonzero(done)] = seen[done]
            seen[window[row] & masks] += 1
            left[request] = begin, masks & ~done, seen
            ended[row + 1] = masks.any() and not left[request][1].any()
        return np.diff(np.cumsum(ended)[offsets])

    def of(self, plan: StepPlan) -> tuple[Bools, Bools | None]:
        """Committed positions, [rows, width]; retained ones if the plan may evict."""
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
        self.counts += (some.sum(), len(forced), masks.sum(), unknown.sum())
        return committed

    def _at(self, plan: StepPlan) -> npt.NDArray[np.int64]:
        at: npt.NDArray[np.int64] = (self._base[plan.requests] + plan.block_start)[:, None] + self._columns
        return at
