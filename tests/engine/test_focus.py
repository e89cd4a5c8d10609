"""FOCUS's selection on worlds small enough to work by hand, and its invariants on any."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dsim.engine.focus import budget, retained


def kept(delta: list[float], positions: list[int], budget: int, progress: int = -1) -> list[int]:
    keep = retained(np.array(delta, np.float32), np.array(positions), budget, progress)
    return [p for p, k in zip(positions, keep, strict=True) if k]


@pytest.mark.parametrize(
    ("num_masked", "num_decoded", "num_steps", "alpha", "expected"),
    [
        (32, 0, 0, 1.5, 2),  # a block's first step: mean 1
        (32, 0, 0, 1.0, 1),
        (32, 4, 3, 1.5, 2),  # 4 / 3 * 1.5 is 2, not a little more
        (32, 7, 2, 1.5, 6),  # 5.25
        (5, 7, 2, 1.5, 5),
        (1, 7, 2, 1.5, 1),
        (0, 7, 2, 1.5, 0),
        (9, 1, 4, 1.5, 2),  # a mean below 1 counts as 1
    ],
)
def test_the_budget_is_the_mean_yield_times_alpha_rounded_up(
    num_masked: int, num_decoded: int, num_steps: int, alpha: float, expected: int
) -> None:
    assert budget(num_masked, num_decoded, num_steps, alpha) == expected


def test_tokens_a_deviation_above_the_mean_are_kept_when_they_fill_the_budget() -> None:
    # Mean 0, deviation 2: two of eight are at least 2, and the budget asks for one.
    assert kept([-2, 2, 2, -2, -2, 2, -2, 2], [0, 2, 4, 6, 8, 10, 12, 14], 1, progress=14) == [2, 4, 10, 14]
    assert kept([0, 0, 0, 3, 0, 0, 0, -3], [0, 2, 4, 6, 8, 10, 12, 14], 1, progress=14) == [6]


def test_the_most_important_fill_a_budget_that_the_deviation_does_not_and_ties_go_left() -> None:
    assert kept([5, 1, 1, 1, -8], [0, 2, 4, 6, 8], 3, progress=8) == [0, 2, 4]


def test_equal_importance_everywhere_keeps_everything() -> None:
    assert kept([0.1, 0.1, 0.1], [1, 2, 3], 1, progress=3) == [1, 2, 3]


def test_no_more_masked_tokens_than_the_budget_are_all_kept() -> None:
    assert kept([3, -1], [4, 9], 2) == [4, 9]
    assert kept([], [], 0) == []


def test_the_left_neighbour_of_a_selected_token_is_kept_and_its_own_is_not() -> None:
    assert kept([0, 0, 0, 9, 0, 0], [2, 3, 4, 5, 7, 8], 1, progress=8) == [4, 5]
    assert kept([0, 0, 0, 9, 0, 0], [1, 2, 3, 5, 7, 8], 1, progress=8) == [5]  # position 4 is decoded


def test_a_token_left_of_the_rightmost_is_kept_until_it_was_computed_once() -> None:
    assert kept([0, 0, 0, 0, 9, 0], [0, 1, 3, 5, 7, 9], 1) == [0, 1, 3, 5, 7]
    assert kept([0, 0, 0, 0, 9, 0], [0, 1, 3, 5, 7, 9], 1, progress=3) == [5, 7]


@given(
    delta=arrays.arrays(np.float32, st.integers(1, 40), elements=st.integers(-3, 3).map(lambda n: n / 3)),
    gaps=st.lists(st.integers(1, 3), min_size=40, max_size=40),
    own=st.integers(1, 40),
    progress=st.integers(-1, 60),
)
def test_every_choice_keeps_the_budget_and_leaves_no_key_uncomputed(
    delta: np.ndarray, gaps: list[int], own: int, progress: int
) -> None:
    positions = np.cumsum(gaps)[: len(delta)]
    keep = retained(delta, positions, min(own, len(delta)), progress)
    assert np.count_nonzero(keep) >= min(own, len(delta))
    assert delta[keep].max() == delta.max()
    rightmost = positions[keep].max()
    assert keep[(positions > progress) & (positions <= rightmost)].all()
