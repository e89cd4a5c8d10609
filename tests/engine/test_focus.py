"""FOCUS's selection, by the book in fractions, and bit for bit as the oracle has it."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.engine.commits import CommitDraws, CommitModel, ImportanceDeltas
from dsim.engine.draw import Draws, delta_row
from dsim.engine.policies import focus as rules
from dsim.engine.state import CACHED, MASKED, PENDING

from ..reference import focus


def retain(
    status: npt.NDArray[np.uint8], window: npt.NDArray[np.bool_], delta: npt.NDArray[np.float32], budgets: Any,
    progress: Any, sample_deviation: bool,
) -> npt.NDArray[np.bool_]:  # fmt: skip
    """What the rule keeps of each row."""
    keep, width = np.zeros(window.shape, np.bool_), window.shape[1]
    scratch = np.zeros(width, np.int64), np.zeros(width, np.uint8)
    for i in range(len(window)):
        own = int(budgets[i]), int(progress[i]), sample_deviation
        rules.retain(status[i], window[i], delta[i], *own, keep[i], *scratch)
    return keep


def kept(delta: list[float], positions: list[int], budget: int, progress: int = -1, sample: bool = False) -> list[int]:
    """The positions of one sequence's masks that the rule keeps; nothing else is computed."""
    width = max(positions, default=0) + 1
    window, own = np.zeros((1, width), np.bool_), np.zeros((1, width), np.float32)
    window[0, positions], own[0, positions] = True, delta
    keep = retain(np.zeros((1, width), np.uint8), window, own, [budget], [progress], sample)
    return np.flatnonzero(keep[0]).tolist()


@pytest.mark.parametrize(
    ("num_decoded", "num_steps", "alpha", "expected"),
    [
        (0, 0, 1.5, 2),  # a block's first step: mean 1
        (0, 0, 1.0, 1),
        (4, 3, 1.5, 2),  # 4 / 3 * 1.5 is 2, not a little more
        (7, 2, 1.5, 6),  # 5.25
        (1, 4, 1.5, 2),  # a mean below 1 counts as 1
    ],
)
def test_the_budget_is_the_mean_yield_times_alpha_rounded_up(
    num_decoded: int, num_steps: int, alpha: float, expected: int
) -> None:
    assert rules.budget(num_decoded, num_steps, alpha) == expected


def test_equal_importance_everywhere_keeps_everything() -> None:
    assert kept([0.1, 0.1, 0.1], [1, 2, 3], 1, progress=3) == [1, 2, 3]


def test_no_more_masked_tokens_than_the_budget_are_all_kept() -> None:
    assert kept([3, -1], [4, 9], 2) == [4, 9]
    assert kept([], [], 0) == []


# ---- the oracle -----------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.integers(0, 64), st.integers(0, 200), st.integers(0, 40),
    st.one_of(st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.7, 32.0]), st.floats(1.0, 50.0)),
)  # fmt: skip
def test_the_budget_is_the_oracle_s(masked: int, decoded: int, steps: int, alpha: float) -> None:
    # The oracle's is never more than there are masks; the rule leaves that to its callers.
    assert min(masked, rules.budget(decoded, steps, alpha)) == focus.budget(masked, decoded, steps, alpha)
    assert rules.budget(decoded, steps, alpha) == max(1, math.ceil(max(decoded / steps if steps else 1.0, 1.0) * alpha))


def draws(rng: np.random.Generator, width: int) -> Draws:
    model = CommitModel("toy", width, 0.9, None, (0.5,) * width)
    lengths = np.full(1000, 16)
    return CommitDraws(
        model, int(rng.integers(2**31)), lengths, lengths, width, ImportanceDeltas(*rng.normal(size=5))
    ).arrays  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([1, 4, 8, 32]))
def test_importance_is_the_oracle_s_bit_for_bit(seed: int, num_rows: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    b, d = Batch(seed, num_rows, width, 0), draws(rng, width)
    masked = b.window & (b.status == MASKED)
    decodable = masked & (rng.random(masked.shape) < 0.4)
    requests, start = rng.integers(0, 1000, num_rows), rng.integers(0, 99, num_rows) * width
    evaluations = rng.integers(0, 9, masked.shape).astype(np.uint16)
    expected = focus.draw_deltas(b.status, b.window, decodable, requests, start, evaluations, d)
    found = np.zeros_like(expected)
    for i in range(num_rows):
        delta_row(
            b.status[i], evaluations[i], b.window[i], decodable[i], int(start[i]), int(requests[i]), d, found[i]
        )  # fmt: skip
    assert found[masked].tobytes() == expected[masked].tobytes()


# ---- the choice of a batch ------------------------------------------------------------------------------------


def by_the_book(
    delta: list[int], positions: list[int], target: int, progress: int, sample_deviation: bool
) -> tuple[list[int], list[int]]:
    """What focus.md 3.4 selects and retains, in whole numbers and fractions."""
    n = len(delta)
    mean = Fraction(sum(delta), n)
    variance = sum((d - mean) ** 2 for d in delta) / (n - sample_deviation)
    high = [i for i in range(n) if delta[i] >= mean and (delta[i] - mean) ** 2 >= variance]
    best = sorted(range(n), key=lambda i: (-delta[i], i))
    selected = high if len(high) >= target else best[:target]
    keep = set(selected) | {i - 1 for i in selected if i and positions[i] - positions[i - 1] == 1}
    rightmost = max(positions[i] for i in keep)
    keep |= {i for i in range(n) if progress < positions[i] < rightmost}
    return sorted(positions[i] for i in selected), sorted(positions[i] for i in keep)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-4, 4), min_size=2, max_size=4).map(lambda d: d * 4),
    st.lists(st.integers(1, 3), min_size=16, max_size=16),
    st.integers(1, 16),
    st.integers(-1, 40),
    st.booleans(),
)
def test_a_choice_is_the_book_s(
    delta: list[int], gaps: list[int], target: int, progress: int, sample_deviation: bool
) -> None:
    # Powers of two of small whole numbers: a float's mean is exact. Fewer than the budget are not chosen among.
    delta = delta[: 1 << (len(delta).bit_length() - 1)]
    positions = (np.cumsum(gaps)[: len(delta)] - 1).tolist()
    target = min(target, len(delta) - 1)
    found = kept([float(d) for d in delta], positions, target, progress, sample_deviation)
    assert found == by_the_book(delta, positions, target, progress, sample_deviation)[1]


def test_a_sample_s_deviation_is_the_larger() -> None:
    # Mean 0. Of all four the deviation is 1: two of them reach it, more than the budget; a sample's is 2 / sqrt(3).
    assert kept([1, -1, 1, -1], [0, 2, 4, 6], 1, 7) == [0, 4]
    assert kept([1, -1, 1, -1], [0, 2, 4, 6], 1, 7, sample=True) == [0]


class Batch:
    """Random rows: states, a window that leaves the cached out, deltas that tie or not, budgets and progress."""

    def __init__(self, seed: int, num_rows: int, width: int, levels: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (num_rows, width)
        lean = rng.dirichlet([0.7, 0.5, 0.3], num_rows)
        self.status = np.array([rng.choice(3, width, p=p) for p in lean], np.uint8).reshape(shape)
        self.window = self.status != CACHED
        normal = rng.normal(size=shape).astype(np.float32)
        self.delta = np.where(levels, (rng.integers(0, max(levels, 1), shape) / 3).astype(np.float32), normal)
        num_masked = (self.window & (self.status == MASKED)).sum(axis=1)
        self.budgets = focus.budget(num_masked, rng.integers(0, 9, num_rows), rng.integers(0, 3, num_rows), 1.5)
        self.progress = rng.integers(-1, width, num_rows).astype(np.int32)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([1, 2, 4, 8, 32, 64]), st.integers(0, 4),
    st.booleans(),
)  # fmt: skip
def test_a_choice_is_the_oracle_s(seed: int, num_rows: int, width: int, levels: int, sample_deviation: bool) -> None:
    b = Batch(seed, num_rows, width, levels)
    args = (b.status, b.window, b.delta, b.budgets, b.progress, sample_deviation)
    before = [a.copy() for a in args[:5]]
    plain = retain(*args)
    assert np.array_equal(plain, focus.retain(*args))
    for a, old in zip(args, before, strict=False):
        assert np.array_equal(a, old)
    assert not (plain & ~b.window).any()
    assert plain[b.window & (b.status == PENDING)].all()
    num_masked = (b.window & (b.status == MASKED)).sum(axis=1)
    num_kept = (plain & (b.status == MASKED)).sum(axis=1)
    assert (num_kept >= np.minimum(b.budgets, num_masked)).all()
    assert (num_kept[num_masked <= b.budgets] == num_masked[num_masked <= b.budgets]).all()


def test_a_committed_token_s_delta_counts_for_nothing() -> None:
    status = np.array([[PENDING, CACHED, PENDING, CACHED], [MASKED, MASKED, MASKED, PENDING]], np.uint8)
    delta = np.array([[9, 9, 9, 9], [0, 0, 1, 9]], np.float32)
    keep = retain(status, status != CACHED, delta, [1, 1], [-1, 3], False)
    assert keep.tolist() == [[True, False, True, False], [False, True, True, True]]
