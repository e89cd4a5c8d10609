"""FOCUS's selection (focus.md 3.4), next to the paper's rule in whole numbers and fractions."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.engine.policies import focus as rules
from dsim.engine.state import CACHED, MASKED, PENDING

from ..checks import cases


def kept(delta: list[float], positions: list[int], budget: int, progress: int = -1) -> list[int]:
    """The positions of one sequence's masks that the rule keeps; nothing else is computed."""
    width = max(positions, default=0) + 1
    window, own = np.zeros(width, np.bool_), np.zeros(width, np.float32)
    window[positions], own[positions] = True, delta
    return retained(np.full(width, MASKED, np.uint8), window, own, budget, progress)


def retained(status: np.ndarray, window: np.ndarray, delta: np.ndarray, budget: int, progress: int) -> list[int]:
    keep, n = window.copy(), len(window)
    rules.retain(status, delta, budget, progress, keep, np.zeros(n, np.int64), np.zeros(n, np.uint8))
    return np.flatnonzero(keep).tolist()


@cases(
    "num_decoded num_steps alpha expected",
    (0, 0, 1.5, 2),  # a block's first step: mean 1
    (0, 0, 1.0, 1),
    (4, 3, 1.5, 2),  # 4 / 3 * 1.5 is 2, not a little more
    (7, 2, 1.5, 6),  # 5.25
    (1, 4, 1.5, 2),  # a mean below 1 counts as 1,
)
def test_the_budget_is_the_mean_yield_times_alpha_rounded_up(
    num_decoded: int, num_steps: int, alpha: float, expected: int
) -> None:
    assert rules.budget(num_decoded, num_steps, alpha) == expected


def by_the_book(delta: Sequence[float], positions: list[int], target: int, progress: int) -> list[int]:
    """What focus.md 3.4 retains."""
    n = len(delta)
    mean = sum(map(Fraction, delta)) / Fraction(n)
    variance = sum((d - mean) ** 2 for d in delta) / n
    high = [i for i in range(n) if delta[i] >= mean and (delta[i] - mean) ** 2 >= variance]
    best = sorted(range(n), key=lambda i: (-delta[i], i))
    selected = high if len(high) >= target else best[:target]
    keep = set(selected) | {i - 1 for i in selected if i and positions[i] - positions[i - 1] == 1}
    rightmost = max(positions[i] for i in keep)
    return sorted(positions[i] for i in keep | {i for i in range(n) if progress < positions[i] < rightmost})


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-4, 4), min_size=2, max_size=4).map(lambda d: d * 4),
    st.lists(st.integers(1, 3), min_size=16, max_size=16),
    st.integers(1, 16),
    st.integers(-1, 40),
)
def test_a_choice_is_the_book_s(delta: list[int], gaps: list[int], target: int, progress: int) -> None:
    # Powers of two of small whole numbers: a float's mean is exact. Fewer than the budget are not chosen among.
    delta = delta[: 1 << (len(delta).bit_length() - 1)]
    positions = (np.cumsum(gaps)[: len(delta)] - 1).tolist()
    target = min(target, len(delta) - 1)
    found = kept([float(d) for d in delta], positions, target, progress)
    assert found == by_the_book(delta, positions, target, progress)


def test_choices_at_the_edges() -> None:
    assert kept([0.1, 0.1, 0.1], [1, 2, 3], 1, progress=3) == [1, 2, 3]  # all alike
    assert (kept([3, -1], [4, 9], 2), kept([], [], 0)) == ([4, 9], [])  # no more than the budget
    # The mean is 0 and the deviation 1: two of them reach it, more than the budget.
    assert kept([1, -1, 1, -1], [0, 2, 4, 6], 1, 7) == [0, 4]


@cases(
    "status delta progress keep",
    ([PENDING, CACHED, PENDING, CACHED], [9, 9, 9, 9], -1, [0, 2]),
    ([MASKED, MASKED, MASKED, PENDING], [0, 0, 1, 9], 3, [1, 2, 3]),
)
def test_committed_tokens_go_on_and_their_deltas_count_for_nothing(
    status: list[int], delta: list[float], progress: int, keep: list[int]
) -> None:
    cells = np.array(status, np.uint8)
    assert retained(cells, cells != CACHED, np.array(delta, np.float32), 1, progress) == keep
