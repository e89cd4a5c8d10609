"""Recorded commits and latencies as rules for another schedule, each answer worked by hand."""

import numpy as np
import pytest

from dsim.engine.journal import STEP_COLUMNS
from dsim.engine.latency import Features, LatencyModel
from dsim.engine.step import StepPlan
from dsim.report.compare.commits import Commits
from dsim.report.compare.latencies import Latencies
from dsim.report.run import Columns

from ..worlds import plan_of
from .fixtures import request_columns

MASKED, PENDING = 0, 1


def blocks(start: int, computed: list[int], evaluations: list[int], masked: list[int] | None = None) -> StepPlan:
    """A plan of request 0's block of four at `start`: marks of the columns computed, and of those that are masks."""
    return plan_of(
        requests=np.zeros(1, np.int32),
        window=np.array([computed], np.bool_),
        status=np.where(np.array([masked or [1, 1, 1, 1]], np.bool_), MASKED, PENDING).astype(np.uint8),
        evaluations=np.array([evaluations], np.uint16),
        block_start=np.array([start], np.int32),
    )


@pytest.fixture
def commits() -> Commits:
    """Request 0: a prompt of 6, so that its blocks begin at 4 and 8. At 4, columns 2 and 3 commit first and third."""
    seen = Commits(request_columns([{"input_length": 6, "output_length": 6}]), 4, 4, False)
    seen.see(blocks(4, [1, 1, 1, 1], [0, 0, 0, 0]), np.array([[False, False, True, False]]))
    seen.see(blocks(4, [1, 1, 1, 1], [0, 0, 0, 2]), np.array([[False, False, False, True]]))
    return seen


def test_a_position_commits_at_the_evaluation_of_the_record_whenever_that_comes(commits: Commits) -> None:
    assert commits.of(blocks(4, [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 1])).tolist() == [[False, False, True, False]]
    assert commits.of(blocks(4, [0, 0, 1, 1], [0, 0, 0, 2], [0, 0, 1, 1])).tolist() == [[False, False, True, True]]
    assert commits.counts == (2, 0, 4, 0)


def test_where_none_is_due_the_soonest_commits(commits: Commits) -> None:
    assert commits.of(blocks(4, [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1])).tolist() == [[False, False, False, True]]
    assert commits.counts == (1, 1, 1, 0)


def test_a_position_without_a_record_takes_the_median(commits: Commits) -> None:
    # The median of 0 and 2 is 1.
    assert commits.of(blocks(8, [1, 1, 0, 0], [1, 0, 0, 0])).tolist() == [[True, False, False, False]]
    assert commits.counts == (1, 0, 2, 2)


def test_what_is_no_mask_never_commits(commits: Commits) -> None:
    assert not commits.of(blocks(4, [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1])).any()
    assert commits.counts == (0, 0, 0, 0)


MODEL = LatencyModel(((0.0, 0.0),), 0.001)  # 1 ms a token


def recorded(tokens: list[int], latency: list[float]) -> Latencies:
    """Decode steps of request 7 alone."""
    n = len(tokens)
    steps: Columns = {name: np.zeros(n, kind) for name, kind in STEP_COLUMNS.items()}
    steps |= {"tokens": np.array(tokens), "latency": np.array(latency)}
    steps |= {"batch": np.ones(n, np.int32), "num_forwards": np.ones(n, np.int32)}
    lists = {"requests": (np.full(n, 7, np.int32), np.arange(n + 1))}
    return Latencies(MODEL, steps, lists)


def step(tokens: int, request: int = 7, prefill: bool = False) -> StepPlan:
    features = Features(tokens, 0, 0, 0, 0, 1, tokens if prefill else 0)
    return plan_of(prefill=prefill, features=features, requests=np.array([request], np.int32))


def test_the_same_step_takes_what_it_took_the_nth_time_and_then_the_mean() -> None:
    latencies = recorded([4, 8, 4], [0.010, 0.5, 0.030])
    assert [latencies(step(4)) for _ in range(3)] == [0.010, 0.030, 0.020]
    assert latencies(step(8)) == 0.5
    latencies.restart()
    assert latencies(step(4)) == 0.010
    assert (latencies.num_steps, latencies.num_nearest) == (1, 0)


def test_a_step_that_was_never_recorded_takes_the_nearest_ones_correction() -> None:
    # Eight steps of 4 tokens took twice their price, and eight of 400 three times.
    latencies = recorded([4] * 8 + [400] * 8, [0.008] * 8 + [1.2] * 8)
    assert latencies(step(5)) == pytest.approx(2 * 0.005)
    assert latencies(step(300)) == pytest.approx(3 * 0.3)
    assert latencies(step(4, request=1)) == pytest.approx(2 * 0.004)
    assert latencies(step(4, prefill=True)) == pytest.approx(2 * 0.004)  # no prefill was recorded
    assert latencies.num_nearest == 4
