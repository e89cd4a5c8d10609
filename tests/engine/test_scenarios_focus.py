"""FOCUS step by step (focus.md 3.1 to 3.8): what is computed, what is left of it, and what the budget goes by."""

from collections.abc import Iterable, Mapping

import numpy as np

from dsim.engine.step import features_left

from ..worlds import World, asked, refusal

FOCUS8 = "focus,block_length=8,page_size=8"

Columns = Mapping[int, Iterable[int]]


class FocusWorld(World):
    """A world whose test also says what goes through all layers."""

    left: tuple[int, ...] = ()  # the features after the last step's eviction

    def end(self, commits: Columns | None = None, retained: Columns | None = None) -> list[int]:
        """End the step in flight: rows that `retained` does not name keep all that they computed."""
        if retained is None:
            self.left = ()
            return self.commit(commits)
        kept = self.plan.window.copy()
        for request, columns in retained.items():
            row = self.plan.requests.tolist().index(request)
            kept[row] = np.isin(np.arange(kept.shape[1]), list(columns))
        self.left = tuple(int(v) for v in features_left(self.plan, kept)[:8])
        return self.commit(commits, kept)

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


def test_an_outcome_that_cannot_be_is_refused() -> None:
    def world(spec: str = FOCUS8) -> FocusWorld:
        w = asked(FocusWorld(spec), (12, 8))
        w.run({0: [6]})
        w.run({}, {0: [0, 1, 2, 3, 4, 6]} if spec == FOCUS8 else None)
        assert w.schedule() == "decode 0D:cccPMMPM"
        return w

    assert "only retained masks commit" in refusal(AssertionError, lambda: world().end({0: [5]}, {0: [3, 4, 6]}))
    assert "only masks are evicted" in refusal(AssertionError, lambda: world().end({}, {0: [3, 4]}))
    assert "only computed positions are retained" in refusal(AssertionError, lambda: world().end({}, {0: [2, 3, 4, 6]}))
    w = world(FOCUS8 + ",alpha=8")
    assert "the plan evicts nothing" in refusal(AssertionError, w.commit, {}, w.plan.window)
