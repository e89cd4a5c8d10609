"""The rules on a block's positions, on arrays small enough to do by hand."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dsim.engine.part import numbers_of
from dsim.engine.policies.delayed_cache import settle_delayed
from dsim.engine.policies.whole_block import select_whole
from dsim.engine.policy import parse
from dsim.engine.rows.blocks import count_prefixes, visible_rows

STATES = {"M": 0, "P": 1, "C": 2}


def states(*texts: str) -> npt.NDArray[np.uint8]:
    return np.array([[STATES[c] for c in text] for text in texts], np.uint8)


def marks(*texts: str) -> npt.NDArray[np.bool_]:
    return np.array([[c == "x" for c in text] for text in texts])


def fields(spec: str) -> Any:
    return numbers_of(parse(spec)).view(np.recarray)[0]


def test_a_whole_block_is_computed_whatever_is_cached_and_no_more() -> None:
    window = np.zeros(8, np.bool_)
    select_whole(states("CPMMCPMM")[0], 4, 99, fields("chunk"), window)
    assert window.tolist() == [True] * 4 + [False] * 4


def test_a_block_s_queries_do_not_see_the_next_block() -> None:
    num, keys, pairs = visible_rows(states("CPMMCPMM", "CPMMCMMM"), marks(".xx..xx.", ".xx....."), 4, True)
    # Row 0: 2 queries on 3 keys, and 2 on 3 + 3. Row 1: no query of the next block reads its cached position.
    assert (num.tolist(), keys.tolist(), pairs.tolist()) == ([4, 2], [6, 3], [2 * 3 + 2 * 6, 2 * 3])


@pytest.mark.parametrize(
    ("spec", "status", "prefill", "after", "evaluations"),
    [
        # The spec's example of the neighbour-aware rule.
        ("chunk,neighbour_aware=true", "PPPPMPPP", False, "CCCPMCCC", [0, 0, 0, 0, 1, 0, 0, 0]),
        # Prompt tokens count after prefill where the policy says so.
        ("chunk", "PPMM", True, "CCMM", [0, 0, 1, 1]),
        ("chunk,prefill_counts=false", "PPMM", True, "PPMM", [0, 0, 1, 1]),
        ("chunk,prefill_counts=false", "PPPP", True, "CCCC", [0, 0, 0, 0]),
    ],
)
def test_a_computed_position_is_cached_by_the_policy_s_rule(
    spec: str, status: str, prefill: bool, after: str, evaluations: list[int]
) -> None:
    cells, counted = states(status)[0], np.zeros(len(status), np.uint16)
    settle_delayed(cells, counted, np.ones(len(status), np.bool_), len(status), fields(spec), prefill)
    assert ("".join("MPC"[s] for s in cells), counted.tolist()) == (after, evaluations)


def test_prefixes_count_commits_by_rank_with_at_least_one() -> None:
    # Row 0 computes 3 masks and commits its second and third; row 1 computes 2 and commits the first.
    rows = states("PMMCM", "CCMMM", "PPPCC"), marks("xxx.x", "..xx.", "xxx.."), marks("..x.x", "..x..", ".....")
    counts, sums = np.zeros((2, 6), np.int64)
    for status, window, committed in zip(*rows, strict=True):
        count_prefixes(status, window, committed, counts, sums)
    assert (counts.tolist(), sums.tolist()) == ([0, 2, 2, 1, 0, 0], [0, 2, 2, 2, 0, 0])
