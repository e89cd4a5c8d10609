"""The engine's own dice yield what the published models were calibrated to."""

import numpy as np
import pytest

from dsim.engine.commits import CommitDraws
from dsim.engine.state import MASKED, PENDING
from dsim.profiler.profile import load

from ..worlds import plan_of

NUM_REQUESTS, NUM_BLOCKS, BLOCK = 32_000, 4, 32  # requests differ so much that 2,000 of them miss the mean by 2 %


def decode(workload: str) -> np.ndarray:
    """Tokens that each denoise step commits, of requests of NUM_BLOCKS whole blocks."""
    model = load("a100-sdar-8b").commit_model(workload, BLOCK, 0.9)
    lengths = np.zeros(NUM_REQUESTS, np.int64), np.full(NUM_REQUESTS, NUM_BLOCKS * BLOCK)
    draws = CommitDraws(model, 1, *lengths, BLOCK)
    counts = []
    for block in range(NUM_BLOCKS):
        status = np.full((NUM_REQUESTS, BLOCK), MASKED, np.uint8)
        evaluations = np.zeros((NUM_REQUESTS, BLOCK), np.uint16)
        rows = np.arange(NUM_REQUESTS, dtype=np.int32)
        while len(rows):
            plan = plan_of(
                requests=rows, status=status[rows], evaluations=evaluations[rows], window=status[rows] == MASKED,
                block_start=np.full(len(rows), block * BLOCK, np.int32),
            )  # fmt: skip
            committed = draws.draw(plan)
            counts.append(committed.sum(axis=1))
            evaluations[rows] += status[rows] == MASKED
            status[rows] = np.where(committed, PENDING, status[rows])
            rows = rows[(status[rows] == MASKED).any(axis=1)]
    return np.concatenate(counts)


@pytest.mark.parametrize(("workload", "mean"), [("sharegpt-focus", 2.28), ("sharegpt-fixed", 5.29)])
def test_the_twin_commits_what_was_published(workload: str, mean: float) -> None:
    assert decode(workload).mean() == pytest.approx(mean, rel=0.015)
