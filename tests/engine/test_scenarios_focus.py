"""FOCUS step by step (focus.md 3.1 to 3.8): what is computed, what is left of it, and what the budget goes by."""

from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from dsim.engine.journal import StepRecorder, unpack
from dsim.engine.step import StepOutcome, features_left

from ..worlds import Collector, World
from .hand import asked

FOCUS8 = "focus,block_length=8,page_size=8"
FOCUS4 = "focus:1,block_length=4,page_size=4"  # a block's first step keeps one mask at least

Columns = Mapping[int, Iterable[int]]


class FocusWorld(World):
    """A world whose test also says what goes through all layers, and that keeps a journal."""

    def __init__(self, spec: str, *, num_pages: int = 1000) -> None:
        super().__init__(spec, num_pages=num_pages)
        self.journal = Collector()
        self.recorder = StepRecorder(self.journal, self.engine.policy.block_length)
        self.left: tuple[int, ...] = ()  # the features after the last step's eviction

    def end(self, commits: Columns | None = None, retained: Columns | None = None) -> list[int]:
        """End the step in flight: rows that `retained` does not name keep all that they computed."""
        plan = self.plan
        assert plan is not None
        rows = {int(request): row for row, request in enumerate(plan.requests)}
        committed, kept = np.zeros(plan.window.shape, np.bool_), plan.window.copy()
        for request, columns in (commits or {}).items():
            committed[rows[request], list(columns)] = True
        for request, columns in (retained or {}).items():
            kept[rows[request]] = False
            kept[rows[request], list(columns)] = True
        outcome = StepOutcome(1.0, committed, retained=None if retained is None else kept)
        self.left = () if retained is None else tuple(int(v) for v in features_left(plan, kept)[:8])
        self.now += 1.0
        done = self.engine.commit(outcome, self.now)
        self.recorder.record(0, plan, outcome, done)
        return sorted(int(i) for i in done)

    def run(self, commits: Columns | None = None, retained: Columns | None = None) -> str:
        """Schedule and end; the step in words."""
        text = self.schedule()
        self.end(commits, retained)
        return text

    def goes_by(self) -> list[tuple[int, int, int]] | None:
        """num_decoded, num_steps and progress of every row of the plan; None when it evicts nothing."""
        e = self.plan.evicting
        if e is None:
            return None
        return list(zip(e.num_decoded.tolist(), e.num_steps.tolist(), e.progress.tolist(), strict=True))


def test_a_block_from_its_first_step_to_the_pass_that_closes_it() -> None:
    w = asked(FocusWorld(FOCUS8), (8, 16))
    assert w.run() == "prefill 0:PPPPPPPP"
    # A mean of 1 makes a budget of ceil(1.5) = 2: of eight masks six may go.
    assert w.schedule() == "decode 0D:MMMMMMMM"
    assert w.goes_by() == [(0, 0, -1)]
    w.end({0: [2]}, {0: range(5)})
    assert w.features() == (8, 8 * 16, 16, 8, 8, 1, 0, 1)
    # Five queries see 8 of history and up to the last of them; soft-max still runs on all of the block.
    assert w.left == (5, 5 * 13, 13, 5, 8, 1, 0, 1)
    # What was evicted is computed again: nothing of it is cached, and the progress is the last that went on.
    assert w.schedule() == "decode 0D:MMPMMMMM"
    assert w.goes_by() == [(1, 1, 4)]
    w.end({0: [3]}, {0: [2, 3]})
    assert w.features() == (8, 8 * 16, 16, 8, 8, 1, 0, 1)
    assert w.left == (2, 2 * 12, 12, 2, 8, 1, 0, 1)
    # 2 waits for its neighbour: 3 was a mask. The progress goes nowhere back.
    assert w.schedule() == "decode 0D:MMPPMMMM"
    assert w.goes_by() == [(2, 2, 4)]
    w.end({}, {0: [2, 3, 5, 6, 7]})
    assert w.left == (5, 5 * 16, 16, 5, 8, 1, 0, 1)
    # A step that decodes nothing does not count.
    assert w.schedule() == "decode 0D:MMcPMMMM"
    assert w.goes_by() == [(2, 2, 7)]
    # An evicted mask was computed as one too: its next draw is another. 2 and 3 were masks but at first.
    assert w.plan.evaluations.tolist() == [[3, 3, 1, 2, 3, 3, 3, 3]]
    w.end({0: [0, 1, 4, 5]}, {0: [0, 1, 3, 4, 5]})
    assert w.features() == (7, 7 * 16, 16, 7, 8, 1, 0, 1)
    assert w.left == (5, 5 * 14, 14, 5, 8, 1, 0, 1)
    # 6 in 3 steps: a budget of 3, and two masks.
    assert w.schedule() == "decode 0D:PPcPPPMM"
    assert w.goes_by() is None
    w.end({0: [7]})
    # 5's neighbour was a mask. 7 is computed for the first time as itself.
    assert w.run({0: [6]}) == "decode 0D:cccccPMP"
    assert w.features() == (3, 3 * 16, 16, 3, 8, 1, 0, 1)
    assert w["num_tokens"][0] == 8
    # Only what is uncached is computed at the end, and 7 is out of sight.
    assert w.run() == "decode 0F:cccccPPc"
    assert w.features() == (2, 2 * 15, 15, 2, 8, 1, 0, 1)
    assert w.goes_by() is None
    # The next block begins anew.
    assert w.schedule() == "decode 0D:MMMMMMMM"
    assert w.goes_by() == [(0, 0, -1)]
    assert w.features() == (8, 8 * 24, 24, 8, 8, 1, 0, 1)
    assert w.end({0: range(8)}, {0: range(8)}) == [0]
    assert (w["num_computed"][0], w["num_forwards"][0], w["num_committed"][0]) == (5 + 2 + 5 + 5 + 7 + 3 + 2 + 8, 8, 16)
    totals = w.engine.totals
    assert (totals.tokens, totals.evicted, totals.committed) == (51, 3 + 6 + 3 + 2, 16)


def test_an_evicted_mask_stays_uncached_and_keeps_its_left_neighbour_so() -> None:
    w = asked(FocusWorld("focus:1,block_length=8,page_size=8"), (12, 12))
    w.run({0: [6, 7]})
    assert w.schedule() == "decode 0D:PPPPMMPP"
    w.end({0: [4]}, {0: [0, 1, 2, 3, 4, 6, 7]})  # 5 goes
    assert w.left == (7, 7 * 16, 16, 7, 8, 1, 0, 1)
    assert w.run({0: [5]}) == "decode 0D:cccPPMcc"
    assert w.features() == (3, 3 * 14, 14, 3, 8, 1, 0, 1)
    assert w.run() == "decode 0F:ccccPPcc"
    assert w.features() == (2, 2 * 14, 14, 2, 8, 1, 0, 1)
    assert w.schedule() == "decode 0D:MMMMMMMM"


def test_a_block_that_a_prefill_begins_comes_to_its_first_step_as_if_new() -> None:
    # The prefill's commits are no steps of the mean, its positions no progress, its prompt tokens uncached.
    w = asked(FocusWorld("focus:1,block_length=8,page_size=8"), (10, 6))
    assert w.run({0: [2, 3, 7]}) == "prefill 0:PPMMMMMM"
    assert w.goes_by() is None
    assert w.schedule() == "decode 0D:PPPPMMMP"
    assert w.goes_by() == [(0, 0, -1)]
    assert w.end({0: [4, 5]}, {0: [0, 1, 2, 3, 4, 5, 7]}) == []
    # The rightmost position that went on is a committed one. One mask is no more than any budget.
    assert w.schedule() == "decode 0D:cccPPPMc"
    assert w.goes_by() is None
    assert w.features() == (4, 4 * 15, 15, 4, 8, 1, 0, 1)
    assert w.end({0: [6]}) == [0]


def one_block(w: FocusWorld) -> None:
    """Prefill, and a block of 4 that decodes three tokens in its first step and one in its second."""
    w.submit(0, 4, 16)
    w.run()
    w.run({0: [0, 1, 2]}, {0: range(4)})
    assert w.run({0: [3]}) == "decode 0D:PPPM"
    assert w.run() == "decode 0F:ccPP"
    assert w.schedule() == "decode 0D:MMMM"


def test_a_mean_of_the_block_begins_anew_with_every_block() -> None:
    w = FocusWorld(FOCUS4)
    one_block(w)
    assert w.goes_by() == [(0, 0, -1)]
    w.end({0: [0]}, {0: [0]})
    w.schedule()
    assert w.goes_by() == [(1, 1, 0)]


def test_a_step_whose_rows_all_fit_their_budgets_evicts_nothing() -> None:
    w = asked(FocusWorld("focus:2,block_length=4,page_size=4"), (4, 8), (6, 2))
    assert w.run() == "prefill 0:PPPP 1:PPMM"
    # Row 1 has two masks for a budget of two, row 0 four: the plan speaks of both.
    assert w.schedule() == "decode 0D:MMMM 1D:PPMM"
    assert w.goes_by() == [(0, 0, -1), (0, 0, -1)]
    w.end({0: [1]}, {0: [0, 1]})
    assert w.schedule() == "decode 0D:MPMM 1D:cPMM"
    assert w.goes_by() == [(1, 1, 1), (0, 0, 3)]
    w.end({0: [2]}, {0: [1, 2]})
    assert w.schedule() == "decode 0D:MPPM 1D:cPMM"
    assert w.goes_by() is None


def test_features_and_journal_of_two_rows_before_and_after() -> None:
    w = asked(FocusWorld(FOCUS8), (8, 16), (20, 12))
    assert w.run({1: [5]}) == "prefill 0:PPPPPPPP 1:PPPPMMMM"
    assert w.schedule() == "decode 0D:MMMMMMMM 1D:PPPPMPMM"
    assert (w.plan.num_tokens.tolist(), w.plan.num_keys.tolist()) == ([8, 8], [16, 24])
    assert w.features() == (16, 8 * 16 + 8 * 24, 16 + 24, 16, 16, 2, 0, 1)
    w.end({0: [1], 1: [4]}, {0: [0, 1], 1: [0, 1, 2, 3, 4, 5]})
    assert w.left == (8, 2 * 10 + 6 * 22, 10 + 22, 8, 16, 2, 0, 1)
    w.recorder.flush()
    steps, lists = w.journal.steps, w.journal.lists
    # The second step evicted columns 2 to 7 of one row, 6 and 7 of the other.
    assert steps["evicted"].tolist() == [0, 8]
    assert steps["evicted_q_kv"].tolist() == [0, 320 - 152]
    assert steps["evicted_kv"].tolist() == [0, 40 - 32]
    assert (steps["tokens"].tolist(), steps["committed"].tolist()) == ([8 + 24, 16], [1, 2])
    values, offsets = lists["evictions"]
    assert offsets.tolist() == [0, 2, 4]
    assert values.tolist() == [0, 0, 0b11111100, 0b11000000]
    assert unpack(lists["window"][0][2:, None], 8).all()
    # Only what went through all layers is computed, in the books of a request.
    assert w["num_computed"][:2] == [2, 6]
    assert (w.engine.totals.tokens, w.engine.totals.evicted, w.engine.totals.forwards) == (16, 8, 2)


def test_a_preempted_sequence_has_no_progress_and_computes_its_block_again() -> None:
    w = asked(FocusWorld(FOCUS4, num_pages=4), (4, 8), (4, 8))
    w.run()
    assert w.run({0: [0, 1, 2], 1: [0]}, {1: [0, 1]}) == "decode 0D:MMMM 1D:MMMM"
    assert w.schedule() == "decode 0D:PPPM 1D:PMMM"
    assert w.goes_by() == [(3, 1, 3), (1, 1, 1)]
    w.end({0: [3], 1: [1]}, {1: [0, 1, 2]})
    assert w.schedule() == "decode 0F:ccPP 1D:PPMM"
    assert w.goes_by() == [(4, 2, 3), (2, 2, 2)]
    w.end({}, {1: [0, 1, 2]})
    assert w.schedule() == "decode 0D:MMMM"
    assert w.plan.preempted == (1,)
    w.end({0: range(4)}, {0: range(4)})
    # 0 had cached by then what it shows no more; 1's prefill computes all of its block, as masks and as tokens.
    assert w.schedule() == "prefill 1:PPMM"
    assert w.features()[0] == 8
    w.end()
    assert w.schedule() == "decode 1D:PPMM"
    # Its KV is lost, what it had decoded is not.
    assert w.goes_by() == [(2, 2, -1)]
    w.end({1: [2]}, {1: [0, 1, 2]})
    assert w.schedule() == "decode 1D:cPPM"


def test_only_what_was_computed_is_sampled_when_the_block_is_not() -> None:
    w = asked(FocusWorld(FOCUS8 + ",sample_block=false"), (8, 8))
    w.run()
    w.schedule()
    w.end({0: [0]}, {0: [0, 1]})
    assert w.features() == (8, 8 * 16, 16, 8, 8, 1, 0, 1)
    assert w.left == (2, 2 * 10, 10, 2, 2, 1, 0, 1)


def test_with_listed_keys_a_query_sees_what_is_cached_and_what_went_on() -> None:
    w = asked(FocusWorld("focus:1,block_length=8,page_size=8,visible=listed"), (12, 12))
    w.run({0: [6, 7]})
    w.run({}, {0: [0, 1, 2, 3, 4, 6, 7]})
    assert w.schedule() == "decode 0D:cccPMMcc"
    assert w.features() == (3, 3 * 16, 16, 3, 8, 1, 0, 1)
    w.end({}, {0: [3, 4]})
    assert w.left == (2, 2 * 15, 15, 2, 8, 1, 0, 1)


def test_an_outcome_that_cannot_be_is_refused() -> None:
    def world(spec: str = FOCUS8) -> FocusWorld:
        w = asked(FocusWorld(spec), (12, 8))
        w.run({0: [6]})
        w.run({}, {0: [0, 1, 2, 3, 4, 6]} if spec == FOCUS8 else None)
        assert w.schedule() == "decode 0D:cccPMMPM"
        return w

    with pytest.raises(AssertionError, match="only retained masks commit"):
        world().end({0: [5]}, {0: [3, 4, 6]})
    with pytest.raises(AssertionError, match="only masks are evicted"):
        world().end({}, {0: [3, 4]})
    with pytest.raises(AssertionError, match="only computed positions are retained"):
        world().end({}, {0: [2, 3, 4, 6]})
    w = world(FOCUS8 + ",alpha=8")
    with pytest.raises(AssertionError, match="the plan evicts nothing"):
        w.engine.commit(StepOutcome(1.0, np.zeros((1, 8), np.bool_), retained=w.plan.window), 9.0)
