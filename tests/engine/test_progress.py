"""No run goes on for ever: it ends in a line that names the request, the place and the reason."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dsim.engine.admission import preempt
from dsim.engine.engine import Engine, Limits
from dsim.engine.errors import PolicyError
from dsim.engine.hooks import decide, select, step_over
from dsim.engine.jit import rule
from dsim.engine.journal import RequestTable
from dsim.engine.part import Answers, Granularity, Policy, Rows
from dsim.engine.policies.chunk import FixedChunk
from dsim.engine.policies.delayed_cache import NeighbourCache
from dsim.engine.policies.lmdeploy_2025 import EVERY_STEP, Continuous, admit, group_step_over
from dsim.engine.policies.whole_block import FixedBlock, NoEviction, select_pending_first
from dsim.engine.request import Request
from dsim.engine.spec import PRESETS
from dsim.engine.state import NOTHING, PREFILL_STEP, ROWS, RUNNING
from dsim.engine.step import StepOutcome
from dsim.engine.view import View
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate

from ..worlds import refusal, toy_profile, toy_trace

pytestmark = pytest.mark.usefixtures("of_the_engine")
PAGES = dataclasses.replace(PRESETS["chunk"].policy.memory, page_size=4)


@dataclass(frozen=True)
class Stale(NeighbourCache):
    """Caches a position only once its right neighbour is committed, whatever the window."""

    def check(self, policy: Policy) -> None:
        """Any granularity will do."""


@dataclass(frozen=True)
class Held(FixedChunk):
    """A window that committed positions may fill, whose right neighbours are masks: no position is ever cached."""

    chunk: int = 2
    block_length: int = 4

    def answers(self, policy: Policy) -> Answers:
        return {**super().answers(policy), select: select_pending_first}


@dataclass(frozen=True)
class OnlyCommitted(Granularity):
    """A rule in plain NumPy that computes no mask once a position is committed."""

    block_length: int = 4

    def select(self, view: View, rows: Rows) -> npt.NDArray[np.bool_]:
        some: npt.NDArray[np.bool_] = rows.status == 1
        return np.where(some.any(axis=1)[:, None], some, rows.status == 0)


@dataclass(frozen=True)
class Swapping(Continuous):
    """A scheduler that preempts all that run before every decode step, so that none of them is ever done."""

    def answers(self, policy: Policy) -> Answers:
        return {**super().answers(policy), decide: swap}


@rule
def swap(replica: Any, policy: Any) -> int:
    """Preempt every running sequence, and prefill it again."""
    counters = replica.counters
    for _ in range(counters.num_running):
        preempt(replica, policy, int(replica.lists[RUNNING, 0]))
    return PREFILL_STEP if admit(replica, policy, ROWS) > 0 else NOTHING


@dataclass(frozen=True)
class Lazy(Continuous):
    """A scheduler that never runs what waits."""

    def answers(self, policy: Policy) -> Answers:
        return {step_over: group_step_over, decide: decide}


HELD = Policy("held", EVERY_STEP, Held(), Stale(), memory=PAGES)
PLAIN = Policy("plain", EVERY_STEP, OnlyCommitted(), Stale(), memory=PAGES)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.engine.engine.MOST_FRUITLESS", 50)


LIMITS = Limits(100, 4096, 4)


def engine_of(policy: Policy, num: int = 1) -> Engine:
    """An engine with requests that wait."""
    engine = Engine(policy, LIMITS, RequestTable(num))
    for i in range(num):
        engine.submit(Request(i, 0.0, 4, 8))
    return engine


def single_steps(engine: Engine, now: float) -> None:
    """What `dsim serve` and `dsim live` do, where nothing that is computed commits."""
    while (plan := engine.schedule(now)) is not None:
        engine.commit(StepOutcome(1.0, np.zeros(plan.window.shape, np.bool_)), now := now + 1.0)


def test_a_server_ends_with_the_request_of_which_nothing_commits() -> None:
    said = refusal(PolicyError, single_steps, engine_of(HELD), 0.0)
    assert said == "policy held: replica 0 at 51 s: request 0 committed nothing in 50 steps of it"


@pytest.mark.parametrize("options", [{}, {"concurrency": 3, "replicas": 2}])
@pytest.mark.parametrize("policy", [HELD, PLAIN])
def test_the_twin_ends_with_the_request_that_no_step_brings_on(policy: Policy, options: dict[str, Any]) -> None:
    requests = toy_trace([0.0] * 60, [5] * 60, [3] * 60)
    with pytest.raises(PolicyError, match=rf"policy {policy.name}: replica \d at .* committed nothing in 50 steps"):
        simulate(requests, Setting(policy, toy_profile()), **options)


@pytest.mark.usefixtures("uncompiled")
def test_requests_that_only_preempt_each_other_end_the_run() -> None:
    policy = dataclasses.replace(HELD, granularity=FixedBlock(4), eviction=NoEviction(), batching=Swapping())
    with pytest.raises(PolicyError, match=r"replica 0 at 51 s: 50 steps in a row committed nothing and finished"):
        single_steps(engine_of(policy), 1.0)


def test_a_scheduler_that_runs_nothing_is_named_with_who_waits() -> None:
    said = refusal(PolicyError, engine_of(dataclasses.replace(HELD, batching=Lazy()), 5).schedule, 0.0)
    assert said == "policy held: replica 0 at 0 s: Lazy runs nothing, and 0 run and 5 wait"
