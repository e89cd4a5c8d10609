"""Which tokens a sparse cache keeps, on scores small enough to rank by eye."""

import numpy as np
import pytest

from ..reference.pooled_topk import kept, merged, num_kept


@pytest.mark.parametrize(
    ("num_candidates", "retention", "at_least", "expected"),
    [(992, 0.5, 0, 496), (1, 0.5, 0, 0), (1, 0.5, 1, 1), (0, 0.5, 1, 0), (7, 0.3, 0, 2), (5, 1.0, 0, 5)],
)
def test_the_number_kept_is_rounded_down(num_candidates: int, retention: float, at_least: int, expected: int) -> None:
    assert num_kept(num_candidates, retention, at_least) == expected


def test_heads_are_added_in_their_order_when_they_share_a_choice() -> None:
    scores = np.array([[1e8, 1.0], [1.0, 2.0], [-1e8, 4.0]], np.float32)
    assert merged(scores, 1, shared=True).tolist() == [[0.0, 7.0]]  # 1e8 + 1 is 1e8 in fp32


def test_the_highest_of_a_group_counts_when_each_head_chooses() -> None:
    scores = np.array([[1, 5], [3, 2], [0, -1], [-4, -2]], np.float32)
    assert merged(scores, 2, shared=False).tolist() == [[3, 5], [0, -1]]


def test_the_best_come_first_and_ties_go_to_the_lower_index() -> None:
    scores = np.array([[1, 3, 2, 3, 0]], np.float32)
    assert kept(scores, 3, pool=1).tolist() == [[1, 3, 2]]
    assert kept(scores, 0, pool=1).shape == (1, 0)


def test_of_no_candidates_none_is_kept() -> None:
    assert kept(np.zeros((2, 0), np.float32), 0, 3).shape == (2, 0)


def test_a_token_counts_with_the_highest_score_around_it() -> None:
    scores = np.array([[0, 0, 0, 9, 0, 0, -5], [7, 0, 0, 0, 0, 0, 8]], np.float32)
    assert kept(scores, 4, pool=3).tolist() == [[2, 3, 4, 0], [5, 6, 0, 1]]
    assert kept(scores, 2, pool=5).tolist() == [[1, 2], [4, 5]]
