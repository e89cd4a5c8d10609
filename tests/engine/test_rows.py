"""The rules of one step, on arrays small enough to do by hand."""

import numpy as np
import numpy.typing as npt
import pytest

from dsim.engine import compiled, rows
from dsim.engine.None import BLOCK_PASS
from dsim.engine.UNKNOWN import DELAYED, NEIGHBOUR

RULES = pytest.mark.parametrize("rules", [rows, compiled], ids=["plain", "compiled"])
STATES = {"M": 0, "P": 1, "C": 2}


def states(*texts: str) -> npt.NDArray[np.uint8]:
    return np.array([[STATES[c] for c in text] for text in texts], np.uint8)


def marks(*texts: str) -> npt.NDArray[np.bool_]:
    return np.array([[c == "x" for c in text] for text in texts])


def text_of(window: npt.NDArray[np.bool_]) -> list[str]:
    return ["".join("x" if v else "." for v in row) for row in window.tolist()]


@RULES
def test_pending_positions_come_first_and_then_the_leftmost_masks(rules) -> None:  # type: ignore[no-untyped-def]
    status = states("MMMPMMPM", "CPCMCMMM", "PPPPMMMM", "CCCCCCCP", "CCCCCCCC")
    reach = np.full(5, 8, np.int32)
    assert text_of(rules.select_window(status, reach, 3, True)) == [
        "x..x..x.", ".x.x.x..", "xxx.....", ".......x", "........",
    ]  # fmt: skip


@RULES
def test_in_order_takes_the_first_open_positions(rules) -> None:  # type: ignore[no-untyped-def]
    status = states("MMMPMMPM", "CPCMCMMM", "PPPPMMMM", "CCCCCCCP")
    reach = np.full(4, 8, np.int32)
    assert text_of(rules.select_window(status, reach, 3, False)) == ["xxx.....", ".x.x.x..", "xxx.....", ".......x"]


@RULES
@pytest.mark.parametrize("pending_first", [True, False])
def test_no_window_passes_its_reach(rules, pending_first: bool) -> None:  # type: ignore[no-untyped-def]
    status = states("CMMMMMMM", "CCCCPMMM")
    window = rules.select_window(status, np.array([4, 8], np.int32), 8, pending_first)
    assert text_of(window) == [".xxx....", "....xxxx"]


@RULES
def test_listed_keys_are_the_cached_and_the_computed_ones(rules) -> None:  # type: ignore[no-untyped-def]
    status = states("CMCPMMCM", "CCCCCCCC")
    window = marks("...x.x..", "........")
    num, keys, pairs = rules.visible_keys(status, window, 8, True)
    # 0, 2, 6 cached; 3 and 5 computed; 1, 4 and 7 are nowhere.
    assert (num.tolist(), keys.tolist(), pairs.tolist()) == ([2, 0], [5, 8], [10, 0])


@RULES
def test_prefix_keys_end_with_the_last_position_computed(rules) -> None:  # type: ignore[no-untyped-def]
    status = states("CMCPMMCM", "CCCCCCCC", "CCCCCCCP")
    window = marks("...x.x..", "........", ".......x")
    num, keys, pairs = rules.visible_keys(status, window, 8, False)
    assert (num.tolist(), keys.tolist(), pairs.tolist()) == ([2, 0, 1], [6, 0, 8], [12, 0, 8])


@RULES
def test_a_block_s_queries_do_not_see_the_next_block(rules) -> None:  # type: ignore[no-untyped-def]
    status = states("CPMMCPMM", "CPMMCMMM")
    window = marks(".xx..xx.", ".xx.....")
    num, keys, pairs = rules.visible_keys(status, window, 4, True)
    # Row 0: 2 queries on 3 keys, and 2 on 3 + 3. Row 1: nobody reads the next block's cached position.
    assert (num.tolist(), keys.tolist(), pairs.tolist()) == ([4, 2], [6, 3], [2 * 3 + 2 * 6, 2 * 3])


def applied(rules, status, window, committed, block, rule):  # type: ignore[no-untyped-def]
    evaluations = np.zeros(status.shape, np.uint16)
    slots = np.arange(len(status), dtype=np.int32)
    masks_left, open_left = rules.apply(status, evaluations, slots, window, committed, block, rule)
    letters = ["".join("MPC"[s] for s in row) for row in status.tolist()]
    return letters, evaluations.tolist(), masks_left.tolist(), open_left.tolist()


@RULES
def test_a_pass_over_a_complete_block_caches_all_of_it(rules) -> None:  # type: ignore[no-untyped-def]
    out = applied(
        rules, states("PPMM", "PPPP", "MMMM", "PPPP"), marks("xxxx", "xxxx", "xxxx", "...."),
        marks("...x", "....", "xxxx", "...."), 4, BLOCK_PASS,
    )  # fmt: skip
    # Complete on leaving is not complete on entry; and a row that computes nothing changes nothing.
    assert out == (
        ["PPMP", "CCCC", "PPPP", "PPPP"],
        [[0, 0, 1, 1], [0] * 4, [1] * 4, [0] * 4],
        [1, 0, 0, 0],
        [4, 0, 4, 4],
    )


@RULES
def test_a_delayed_cache_keeps_what_was_computed_as_committed(rules) -> None:  # type: ignore[no-untyped-def]
    out = applied(rules, states("PPMMPM"), marks("x.x.xx"), marks("..x..."), 6, DELAYED)
    assert out == (["CPPMCM"], [[0, 0, 1, 0, 0, 1]], [2], [4])


@RULES
def test_the_neighbour_aware_rule_reproduces_the_spec_s_example(rules) -> None:  # type: ignore[no-untyped-def]
    out = applied(rules, states("PPPPMPPP"), marks("xxxxxxxx"), marks("........"), 8, NEIGHBOUR)
    assert out == (["CCCPMCCC"], [[0, 0, 0, 0, 1, 0, 0, 0]], [1], [2])
    # The neighbour's state is that of the input: a commit in this very step comes too late.
    out = applied(rules, states("PPPPMPPP"), marks("xxxxxxxx"), marks("....x..."), 8, NEIGHBOUR)
    assert out[0] == ["CCCPPCCC"]


@RULES
def test_only_the_current_block_is_counted(rules) -> None:  # type: ignore[no-untyped-def]
    window, committed = marks("...xxx..", "..xxxx.."), marks("....x...", "..xx.x..")
    out = applied(rules, states("CCCPMMMM", "CCMMPMMM"), window, committed, 4, DELAYED)
    assert out[0] == ["CCCCPMMM", "CCPPCPMM"]
    assert out[2:] == ([0, 0], [0, 2])


@RULES
def test_slots_say_which_rows_of_the_state_change(rules) -> None:  # type: ignore[no-untyped-def]
    status = states("MM", "MM", "MM")
    evaluations = np.array([[7, 7], [8, 8], [9, 9]], np.uint16)
    slots = np.array([2, 0], np.int32)
    left = rules.apply(status, evaluations, slots, marks("xx", "x."), marks("x.", "x."), 2, DELAYED)
    assert status.tolist() == [[1, 0], [0, 0], [1, 0]]
    assert evaluations.tolist() == [[8, 7], [8, 8], [10, 10]]
    assert [x.tolist() for x in left] == [[1, 1], [2, 2]]


@RULES
@pytest.mark.parametrize(
    ("pending_counts", "counts", "sums"),
    [
        # Masks alone: row 0 computes 3 and commits its second and third; row 1 computes 2 and commits the first.
        (False, [0, 2, 2, 1, 0, 0], [0, 2, 2, 2, 0, 0]),
        # The whole window: row 0 is P M M M with nothing among the first position to commit, row 1 is M M.
        (True, [0, 2, 2, 1, 1, 0], [0, 1, 2, 1, 2, 0]),
    ],
)
def test_prefixes_count_commits_by_rank_with_at_least_one_where_a_mask_is(rules, pending_counts, counts, sums) -> None:  # type: ignore[no-untyped-def]
    status = states("PMMCM", "CCMMM", "PPPCC")
    window = marks("xxx.x", "..xx.", "xxx..")
    committed = marks("..x.x", "..x..", ".....")
    got = np.zeros((2, 6), np.int64)
    rules.count_prefixes(status, window, committed, pending_counts, got[0], got[1])
    assert got.tolist() == [counts, sums]
