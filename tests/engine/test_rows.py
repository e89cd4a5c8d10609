"""The rules on a block's positions: on arrays small enough to do by hand, and held to plain NumPy on random ones."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.engine.commits import CommitDraws, CommitModel
from dsim.engine.draw import draw_plan
from dsim.engine.part import numbers_of
from dsim.engine.policies.chunk import select_in_order
from dsim.engine.policies.delayed_cache import settle_delayed
from dsim.engine.policies.whole_block import select_pending_first, select_whole, settle_block_pass
from dsim.engine.policy import parse
from dsim.engine.rows.blocks import count_prefixes, visible_rows
from dsim.engine.state import CACHED, MASKED

from ..reference import rows
from ..reference.rows import BLOCK_PASS, DELAYED, NEIGHBOUR

STATES = {"M": 0, "P": 1, "C": 2}
BLOCKS = (1, 2, 4, 8, 32, 64)
CASES = settings(max_examples=60, deadline=None, derandomize=True)
FIELDS = {
    DELAYED: numbers_of(parse("chunk"))[0],
    NEIGHBOUR: numbers_of(parse("chunk,neighbour_aware=true"))[0],
}
NO_PREFILL = numbers_of(parse("chunk,prefill_counts=false"))[0]


def states(*texts: str) -> npt.NDArray[np.uint8]:
    return np.array([[STATES[c] for c in text] for text in texts], np.uint8)


def marks(*texts: str) -> npt.NDArray[np.bool_]:
    return np.array([[c == "x" for c in text] for text in texts])


def text_of(window: npt.NDArray[np.bool_]) -> list[str]:
    return ["".join("x" if v else "." for v in row) for row in window.tolist()]


def select(status: npt.NDArray[np.uint8], reach: Any, chunk: int, pending_first: bool) -> npt.NDArray[np.bool_]:
    """The windows that the rule marks, row by row."""
    window = np.zeros(status.shape, np.bool_)
    rule = select_pending_first if pending_first else select_in_order
    for i in range(len(status)):
        rule(status[i], int(reach[i]), chunk, FIELDS[DELAYED], window[i])
    return window


def settle(
    status: npt.NDArray[np.uint8], evaluations: Any, window: Any, block: int, kind: int, prefill: bool = False
) -> tuple[Any, Any]:
    """States and evaluations after the rule, row by row."""
    after, counted = status.copy(), evaluations.copy()
    rule = settle_block_pass if kind == BLOCK_PASS else settle_delayed
    for i in range(len(status)):
        rule(after[i], counted[i], window[i], block, FIELDS.get(kind, NO_PREFILL), prefill)
    return after, counted


def prefixes(status: Any, window: Any, committed: Any, pending_counts: bool) -> Any:
    """Counts and sums, [2, width + 1]."""
    got = np.zeros((2, status.shape[1] + 1), np.int64)
    for i in range(len(status)):
        count_prefixes(status[i], window[i], committed[i], pending_counts, got[0], got[1])
    return got


# ---- by hand --------------------------------------------------------------------------------------------------


def test_a_whole_block_is_computed_whatever_is_cached_and_no_more() -> None:
    window = np.zeros(8, np.bool_)
    select_whole(states("CPMMCPMM")[0], 4, 99, FIELDS[DELAYED], window)
    assert text_of(window[None]) == ["xxxx...."]


def test_a_block_s_queries_do_not_see_the_next_block() -> None:
    num, keys, pairs = visible_rows(states("CPMMCPMM", "CPMMCMMM"), marks(".xx..xx.", ".xx....."), 4, True)
    # Row 0: 2 queries on 3 keys, and 2 on 3 + 3. Row 1: nobody reads the next block's cached position.
    assert (num.tolist(), keys.tolist(), pairs.tolist()) == ([4, 2], [6, 3], [2 * 3 + 2 * 6, 2 * 3])


def settled(status: str, window: str, block: int, kind: int, prefill: bool = False) -> tuple[str, list[int]]:
    cells = states(status)
    after, counted = settle(cells, np.zeros(cells.shape, np.uint16), marks(window), block, kind, prefill)
    return "".join("MPC"[s] for s in after[0].tolist()), counted[0].tolist()


def test_the_neighbour_aware_rule_reproduces_the_spec_s_example() -> None:
    assert settled("PPPPMPPP", "xxxxxxxx", 8, NEIGHBOUR) == ("CCCPMCCC", [0, 0, 0, 0, 1, 0, 0, 0])


def test_prompt_tokens_count_after_prefill_where_the_policy_says_so() -> None:
    assert settled("PPMM", "xxxx", 4, DELAYED, prefill=True) == ("CCMM", [0, 0, 1, 1])
    assert settled("PPMM", "xxxx", 4, -1, prefill=True) == ("PPMM", [0, 0, 1, 1])
    assert settled("PPPP", "xxxx", 4, -1, prefill=True) == ("CCCC", [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("pending_counts", "counts", "sums"),
    [
        # Masks alone: row 0 computes 3 and commits its second and third; row 1 computes 2 and commits the first.
        (False, [0, 2, 2, 1, 0, 0], [0, 2, 2, 2, 0, 0]),
        # The whole window: row 0 is P M M M with nothing among the first position to commit, row 1 is M M.
        (True, [0, 2, 2, 1, 1, 0], [0, 1, 2, 1, 2, 0]),
    ],
)
def test_prefixes_count_commits_by_rank_with_at_least_one_where_a_mask_is(
    pending_counts: bool, counts: list[int], sums: list[int]
) -> None:
    got = prefixes(
        states("PMMCM", "CCMMM", "PPPCC"), marks("xxx.x", "..xx.", "xxx.."), marks("..x.x", "..x..", "....."),
        pending_counts,
    )  # fmt: skip
    assert got.tolist() == [counts, sums]


# ---- at random ------------------------------------------------------------------------------------------------


class Case:
    """A random batch: statuses, evaluations, windows of open positions, commits among the window's masks."""

    def __init__(self, seed: int, num: int, block: int, twice: bool) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.block, self.width = block, block * (2 if twice else 1)
        shape = (num, self.width)
        # Rows lean each their own way, so that some are all masked or all cached.
        lean = rng.dirichlet([0.5, 0.5, 0.5], num)
        self.status = np.array([rng.choice(3, self.width, p=p) for p in lean], np.uint8).reshape(shape)
        self.evaluations = rng.integers(0, 5, shape).astype(np.uint16)
        self.window = (rng.random(shape) < rng.random((num, 1))) & (self.status != CACHED)
        self.masks = self.window & (self.status == MASKED)
        self.committed = self.masks & (rng.random(shape) < rng.random((num, 1)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 6)), draw(st.sampled_from(BLOCKS)), draw(st.booleans())
    )


@CASES
@given(cases(), st.integers(0, 70), st.booleans())
def test_windows_are_the_oracle_s(case: Case, chunk: int, pending_first: bool) -> None:
    reach = case.rng.choice([case.block, case.width], len(case.status))
    window = select(case.status, reach, chunk, pending_first)
    assert np.array_equal(window, rows.select_window(case.status, reach, chunk, pending_first))
    assert (window.sum(axis=1) <= chunk).all()


@CASES
@given(cases(), st.booleans())
def test_visible_keys_are_the_oracle_s(case: Case, listed: bool) -> None:
    args = (case.status, case.window, case.block, listed)
    for found, expected in zip(visible_rows(*args), rows.visible_keys(*args), strict=True):
        assert np.array_equal(found, expected)


@CASES
@given(cases(), st.sampled_from([BLOCK_PASS, DELAYED, NEIGHBOUR]))
def test_states_after_a_step_are_the_oracle_s(case: Case, kind: int) -> None:
    args = (case.status, case.evaluations, case.window, case.block, kind)
    for found, expected in zip(settle(*args), rows.settle(*args), strict=True):
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())


@CASES
@given(cases(), st.booleans())
def test_prefix_counts_are_the_oracle_s(case: Case, pending_counts: bool) -> None:
    args = (case.status, case.window, case.committed, pending_counts)
    assert prefixes(*args).tolist() == [part.tolist() for part in rows.count_prefixes(*args)]


def check_draws(case: Case, chance: npt.NDArray[np.float64]) -> None:
    """What a commit model of these chances at each distance commits is the oracle's, and at least one a row."""
    rng, n, block = case.rng, len(case.status), case.block
    spreads = dict(zip(("request_spread", "block_spread", "step_spread", "stage_gain"), rng.random(4), strict=True))
    model = CommitModel("toy", block, 0.9, None, tuple(chance[:block]), padding_share=0.3, **spreads)
    prompt, output = rng.integers(1, 50 * block, 40), rng.integers(1, 6 * block, 40)
    d = CommitDraws(model, int(rng.integers(2**31)), prompt, output, case.width).arrays
    with np.errstate(divide="ignore"):
        d.odds[:] = chance / (1 - chance)
    requests = rng.permutation(40)[:n]
    start = (prompt[requests] // block + rng.integers(0, 4, n)) * block
    committed = draw_plan(case.status, case.evaluations, case.window, start, requests, d)
    assert np.array_equal(
        committed, rows.draw_commits(case.status, case.evaluations, case.window, start, requests, d)
    )  # fmt: skip
    assert not (committed & ~case.masks).any()
    assert (committed.any(axis=1) == case.masks.any(axis=1)).all()


@settings(CASES, max_examples=120)
@given(cases())
def test_commits_are_the_oracle_s(case: Case) -> None:
    check_draws(case, case.rng.random(case.width) * case.rng.random())


@pytest.mark.parametrize("certain", [0.0, 1e-12, 1.0])
def test_commits_are_the_oracle_s_where_chance_is_nearly_none_or_certain(certain: float) -> None:
    for seed in range(20):
        case = Case(seed, 5, 8, seed % 2 == 0)
        check_draws(case, np.where(case.rng.random(case.width) < 0.5, certain, 0.3))
        check_draws(case, np.full(case.width, certain))
