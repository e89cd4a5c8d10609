"""The unmasking rules on blocks worked by hand (block-diffusion.md 1.4)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.engine.unmasking import STRATEGIES, Unmasking, unmask

MASKED = np.array([[1, 0, 1, 1, 0, 1, 1, 0]], np.bool_)
CONFIDENCE = np.array([[0.5, 1.0, 0.9, 0.95, 1.0, 0.6, 0.9, 1.0]], np.float32)


def columns(rule: Unmasking, confidence: np.ndarray = CONFIDENCE, masked: np.ndarray = MASKED) -> list[int]:
    return np.flatnonzero(unmask(rule, confidence, masked, 8)[0]).tolist()


def test_dynamic_commits_what_reaches_the_threshold_and_always_the_best() -> None:
    assert columns(Unmasking(0.9)) == [2, 3, 6]
    assert columns(Unmasking(0.9, strict=True)) == [3]
    assert columns(Unmasking(0.99)) == [3]


def test_of_equally_confident_masks_the_leftmost_commits() -> None:
    level = np.full((1, 8), 0.25, np.float32)
    assert columns(Unmasking(0.9), level) == [0]
    assert columns(Unmasking(strategy="low_confidence_static", denoising_steps=4), level) == [0, 2]


def test_static_commits_the_n_most_confident_and_what_there_is_where_fewer_are_left() -> None:
    assert columns(Unmasking(strategy="low_confidence_static")) == [3]
    assert columns(Unmasking(strategy="low_confidence_static", denoising_steps=4)) == [2, 3]
    assert columns(Unmasking(strategy="low_confidence_static", denoising_steps=1)) == [0, 2, 3, 5, 6]
    # More steps than positions: one at a time.
    assert columns(Unmasking(strategy="low_confidence_static", denoising_steps=100)) == [3]


@pytest.mark.parametrize(("block", "steps"), [(8, 1), (8, 3), (8, 5), (8, 8), (32, 20)])
def test_by_the_schedule_the_first_steps_of_a_block_take_what_is_left_over(block: int, steps: int) -> None:
    confidence = np.random.default_rng(steps).random((1, block)).astype(np.float32)
    masked, committed = np.ones((1, block), np.bool_), []
    for step in range(steps):
        rule = Unmasking(strategy="low_confidence_static", denoising_steps=steps)
        chosen = unmask(rule, confidence, masked, block, np.array([step]))
        rest = confidence[masked & ~chosen]
        assert not len(rest) or confidence[chosen].min() > rest.max()
        committed.append(int(chosen.sum()))
        masked &= ~chosen
    more = block % steps
    assert committed == [block // steps + 1] * more + [block // steps] * (steps - more)


def test_rows_of_a_batch_are_each_at_their_own_step() -> None:
    rule = Unmasking(strategy="low_confidence_static", denoising_steps=3)  # 3, 3, 2 of 8
    chosen = unmask(rule, np.ones((3, 8), np.float32), np.ones((3, 8), np.bool_), 8, np.array([2, 0, 1]))
    assert chosen.sum(axis=1).tolist() == [2, 3, 3]


def test_a_row_without_masks_commits_nothing() -> None:
    for strategy in STRATEGIES:
        assert not unmask(Unmasking(strategy=strategy), CONFIDENCE, np.zeros_like(MASKED), 8).any()
    assert unmask(Unmasking(), np.zeros((0, 8), np.float32), np.zeros((0, 8), np.bool_), 8).shape == (0, 8)


@given(st.integers(0, 2**32 - 1), st.sampled_from(STRATEGIES), st.integers(1, 40))
def test_only_computed_masks_commit_and_at_least_one_where_there_is_one(seed: int, strategy: str, steps: int) -> None:
    chance = np.random.default_rng(seed)
    masked = chance.random((5, 32)) < chance.random((5, 1))
    rule = Unmasking(0.9, strategy=strategy, denoising_steps=steps)
    chosen = unmask(rule, chance.random((5, 32)).astype(np.float32), masked, 32)
    assert not (chosen & ~masked).any()
    assert (chosen.any(axis=1) == masked.any(axis=1)).all()
