"""The example of Sangam's scheduler (examples/policies/sangam.py), by hand and in a replay."""

from pathlib import Path

import pytest

from dsim.engine.allowed_code import allowed
from dsim.engine.commits import ScheduledCommits
from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.policy import parse
from dsim.engine.request import Request
from dsim.engine.step import StepOutcome
from dsim.profiler.profile import load
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate

from ..worlds import toy_trace

FILE = Path(__file__).parents[2] / "examples" / "policies" / "sangam.py"
SMALL = f"{FILE}:POLICY,block_length=4,page_size=4"

pytestmark = pytest.mark.slow


class Worker:
    """An engine of the example; steps take 1 s."""

    def __init__(self, spec: str, num_pages: int = 1000) -> None:
        policy = parse(spec, allowed([FILE]))
        self.engine = Engine(policy, Limits(num_pages, 4096, policy.batching.max_batch or 128), RequestTable(8))
        self._draws = ScheduledCommits(policy.block_length, policy.unmasking.denoising_steps)
        self._now = 0.0

    def submit(self, index: int, prompt: int, output: int) -> None:
        assert self.engine.submit(Request(index, self._now, prompt, output))

    def step(self) -> list[tuple[int, int]]:
        """Each row's request and its query tokens."""
        plan = self.engine.schedule(self._now)
        if plan is None:
            return []
        self._now += 1.0
        self.engine.commit(StepOutcome(1.0, self._draws.draw(plan)), self._now)
        return list(zip(plan.requests.tolist(), plan.num_tokens.tolist(), strict=True))


def test_the_pass_that_begins_a_block_commits_and_every_row_decodes_in_every_step() -> None:
    worker = Worker(SMALL)
    worker.submit(0, 10, 8)
    worker.submit(1, 3, 4)
    assert worker.step() == [(0, 18), (1, 7)]
    assert [worker.step() for _ in range(3)] == [[(0, 4), (1, 4)]] * 3
    assert [worker.step() for _ in range(5)] == [[(0, 18)], *[[(0, 4)]] * 3, []]


def test_a_long_pass_saves_up_budget_over_steps() -> None:
    worker = Worker(f"{SMALL},max_batched_tokens=20")
    worker.submit(0, 4, 12)
    assert worker.step() == [(0, 16)]
    worker.submit(1, 40, 4)  # 44 tokens
    worker.submit(2, 3, 4)  # would fit, and stands behind
    # 4 tokens are left by the first step, 16 by each of the next two.
    assert [worker.step() for _ in range(2)] == [[(0, 4)]] * 2
    assert worker.step() == [(0, 4), (1, 44), (2, 7)]


def test_the_pages_of_a_request_are_free_between_its_blocks() -> None:
    worker = Worker(f"{SMALL},max_batched_tokens=16")
    worker.submit(0, 8, 8)
    worker.step()
    assert worker.engine.pages_held == 4
    for _ in range(3):
        worker.step()
    assert worker.engine.pages_held == 0
    assert worker.step() == [(0, 16)]


def test_no_more_requests_run_than_the_batch_allows() -> None:
    worker = Worker(f"{SMALL},max_batch=2")
    for request in range(3):
        worker.submit(request, 4, 4)
    assert worker.step() == [(0, 8), (1, 8)]


def test_a_twin_replays_it() -> None:
    policy = parse(f"{FILE}:POLICY,num_pages=40", allowed([FILE]))
    trace = toy_trace([0.1 * i for i in range(20)], [5 + i for i in range(20)], [40] * 20)
    result = simulate(trace, Setting(policy, load("h100-llada-8b")))
    assert (result.table["status"] == 0).all()
