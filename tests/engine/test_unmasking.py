"""The unmasking rules on blocks worked by hand (block-diffusion.md 1.4)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.engine.unmasking import STRATEGIES, Unmasking, unmask

from ..checks import cases

MASKED = np.array([[1, 0, 1, 1, 0, 1, 1, 0]], np.bool_)
CONFIDENCE = np.array([[0.5, 1.0, 0.9, 0.95, 1.0, 0.6, 0.9, 1.0]], np.float32)


ALIKE = np.full((1, 8), 0.25, np.float32)  # of which the leftmost commit
STATIC = "low_confidence_static"


@cases(
    "rule confidence columns",
    # What reaches the threshold, and always the best.
    (Unmasking(0.9), CONFIDENCE, [2, 3, 6]),
    (Unmasking(0.9, strict=True), CONFIDENCE, [3]),
    (Unmasking(0.99), CONFIDENCE, [3]),
    (Unmasking(0.9), ALIKE, [0]),
    # The n most confident, and what there is where fewer are left; one at a time for more steps than positions.
    (Unmasking(strategy=STATIC), CONFIDENCE, [3]),
    (Unmasking(strategy=STATIC, denoising_steps=4), CONFIDENCE, [2, 3]),
    (Unmasking(strategy=STATIC, denoising_steps=1), CONFIDENCE, [0, 2, 3, 5, 6]),
    (Unmasking(strategy=STATIC, denoising_steps=100), CONFIDENCE, [3]),
    (Unmasking(strategy=STATIC, denoising_steps=4), ALIKE, [0, 2]),
)
def test_the_most_confident_masks_commit(rule: Unmasking, confidence: np.ndarray, columns: list[int]) -> None:
    assert np.flatnonzero(unmask(rule, confidence, MASKED, 8)[0]).tolist() == columns


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
