"""A commit log is read from a journal as the engine saw it."""

from typing import Any

import numpy as np
import pytest

from dsim.engine.commits import CommitDraws
from dsim.engine.engine import Engine, Limits
from dsim.engine.errors import ProfileError
from dsim.engine.journal import RequestTable, StepRecorder
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.engine.state import MASKED
from dsim.engine.step import StepOutcome
from dsim.profiler.commit_log import from_journal
from dsim.profiler.profile import load

LENGTHS = ((5, 90), (64, 40), (130, 200), (1, 33), (31, 65))


def journal(policy: str, num_pages: int) -> tuple[dict[str, Any], list[Any], Any]:
    """A run's list columns, the rows of its plans, and its request table."""
    chosen = parse(policy)
    inputs, outputs = np.array(LENGTHS).T
    draws = CommitDraws(load("a100-sdar-8b").commits[1], 3, inputs, outputs, 32)
    table = RequestTable(len(LENGTHS))
    engine = Engine(chosen, Limits(num_pages, 4096, 8), table)
    for i, (length, more) in enumerate(LENGTHS):
        engine.submit(Request(i, 0.0, length, more))
    lists: dict[str, Any] = {}
    recorder = StepRecorder(lambda _, found: lists.update({k: v for k, (v, _) in found.items()}), 32)
    rows, now = [], 0.0
    while (plan := engine.schedule(now)) is not None:
        outcome = StepOutcome(1.0, draws.draw(plan))
        now += 1.0
        rows.append((plan.requests, plan.block_start, plan.status, plan.window, outcome.committed))
        recorder.record(0, plan, outcome, engine.commit(outcome, now))
    recorder.flush()
    return lists, rows, table


@pytest.mark.parametrize("policy", ["lmdeploy-bd32", "chunk:8", "delayed-cache-plus"])
@pytest.mark.parametrize("num_pages", [100, 7])  # 7: sequences are preempted
def test_a_journal_tells_the_blocks_that_the_engine_had(policy: str, num_pages: int) -> None:
    lists, rows, table = journal(policy, num_pages)
    assert (table["num_preemptions"].sum() > 0) == (num_pages == 7)
    found = from_journal(32, np.array(LENGTHS)[:, 0], *(lists[name] for name in ("requests", "window", "commits")))
    request, start, status, window, committed = (np.concatenate(column) for column in zip(*rows, strict=True))
    masked = status == MASKED
    computes = (window & masked).any(axis=1)
    expected = {"request": request, "block_start": start, "masked": masked, "window": window & masked,
                "committed": committed}  # fmt: skip
    for name, column in expected.items():
        assert np.array_equal(getattr(found, name), column[computes]), name
    # Every output token was a mask once, and the last block's tail with them.
    whole = [-(-(p + n) // 32) * 32 - p for p, n in LENGTHS]
    assert np.bincount(found.request, found.committed.sum(axis=1)).tolist() == whole


def test_a_commit_of_what_was_not_computed_is_refused() -> None:
    words = np.array([[0b0001], [0b0010]], np.uint64)
    with pytest.raises(ProfileError, match="request 0 committed what is not a computed mask"):
        from_journal(4, np.array([0]), np.array([0], np.int32), words[:1], words[1:])
    with pytest.raises(ProfileError, match="the journal's windows reach beyond the block"):
        from_journal(65, np.array([0]), np.array([0], np.int32), words[:1], words[:1])


def test_rows_that_compute_no_mask_are_left_out() -> None:
    windows, commits = np.array([[0b11], [0b11]], np.uint64), np.array([[0], [0b01]], np.uint64)
    log = from_journal(2, np.array([0, 0]), np.array([0, 1], np.int32), windows, commits)
    assert (log.request.tolist(), log.window.tolist()) == ([1], [[True, True]])
