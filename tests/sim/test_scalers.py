"""What a scaler sees, and what the shipped scalers answer, by numbers written out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan, nan

import numpy as np
import pytest

from dsim.engine.spec import parse
from dsim.profiler.profile import load
from dsim.sim.pools import Fleet, Pool
from dsim.sim.routers import routing
from dsim.sim.scalers import Scaling, scaling
from dsim.sim.scalers.hpa import Hpa
from dsim.sim.scalers.queued_forwards import QueuedForwards
from dsim.sim.scalers.scaler import PoolView, ReplicaLoads, Scaler
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate

from ..worlds import SECOND, toy_profile, toy_trace


@dataclass(frozen=True)
class Watcher(Scaler):
    """Keeps every view, and changes nothing."""

    every: float = 5.0
    seen: list[PoolView] = field(default_factory=list)

    def targets(self, now: float, pools: Sequence[PoolView]) -> Sequence[int]:
        self.seen.extend(pools)
        return [pool.ready for pool in pools]


def watched(arrival: list[float], count: int) -> list[PoolView]:
    """The views of three requests on replicas that run one at a time."""
    watcher, setting = Watcher(), Setting(parse("ar,max_batch=1"), toy_profile(latency=SECOND))
    fleet = Fleet((Pool(setting, count),), routing("jsq"), Scaling("w", watcher))
    simulate(toy_trace(arrival, [10, 20, 30], [8, 4, 6]), fleet)
    return watcher.seen


def test_a_scaler_sees_what_waits_and_what_runs() -> None:
    # One at a time, a second a step: the first request runs from 0 to 8 s, the others wait.
    at_start, at_5, at_10, *_ = watched([0, 1, 2], 1)
    assert (at_start.submitted, at_start.waiting, at_start.ready) == (1, 1, 1)
    assert (at_5.submitted, at_5.completed, at_5.waiting, at_5.running) == (2, 0, 2, 1)
    assert at_5.queued_tokens == 20 + 30
    assert (at_5.waiting_blocks, at_5.running_blocks) == (4 + 6, 8 - 4)  # blocks of one token; 4 are returned at 4 s
    assert at_5.ttft == 1  # of the first request alone
    assert isnan(at_5.e2el)
    assert (at_10.submitted, at_10.completed, at_10.e2el, at_10.itl) == (0, 1, 8, 1)
    assert at_10.ttft == 9 - 1  # the second request starts at 8 s


def test_a_scaler_sees_the_steps_of_each_replica() -> None:
    _, at_5, *_ = watched([0, 0, 1], 2)
    # Replica 0 has a prefill of 10 and decodes; replica 1 one of 20, three decodes and, from 4 s on, the third request.
    assert at_5.loads.waiting.tolist() == [1, 0]  # the third goes to replica 0, the first of equals
    assert at_5.loads.steps.tolist() == [4, 4]  # the step from 4 to 5 s ends after the tick
    assert at_5.loads.step_time.tolist() == [1, 1]
    assert at_5.loads.step_rows.tolist() == [1, 1]
    assert at_5.tokens_per_forward == 1
    assert at_5.forwards_per_block == 1


POOL = PoolView("pool", 4, 0, 0, 0, 0, 0, 0, 4 * 6875, 0, 0, max_batch=64, tokens_per_forward=1.0)


def test_hpa_removes_no_replica_at_the_first_tick_for_want_of_traffic() -> None:
    # Kubernetes: the replicas at the first tick count as a wish for 300 s. They do not delay an increase.
    hpa = Hpa().begin()
    assert [list(hpa.targets(now, [POOL])) for now in (0, 15, 285, 315)] == [[4], [4], [4], [1]]
    assert list(Hpa().begin().targets(0, [POOL._replace(waiting=80)])) == [10]


def test_queued_forwards_divides_the_forwards_that_come_and_wait_by_a_full_replicas() -> None:
    found = QueuedForwards(every=10, window=20, drain=10, load=0.5, down_window=0).begin()
    # A forward takes 1 ms and 16 ms over the rows: 64 rows do 800 a second, of which half is planned with.
    rows = np.array([1.0, 2, 4, 8])
    busy = 0.001 + 0.016 / rows
    loads = ReplicaLoads(np.zeros(4), np.full(4, 10.0), rows * busy, rows, rows * 10)
    pool = POOL._replace(block_length=32, tokens_per_forward=4.0, submitted_blocks=950, loads=loads)
    assert list(found.targets(0, [pool])) == [4]  # four samples: the number stays
    assert list(found.targets(10, [pool])) == [2]  # 95 blocks a second x 8 forwards over 400
    assert list(found.targets(20, [pool._replace(submitted_blocks=1900)])) == [3]  # 142.5 a second over two ticks
    assert list(found.targets(30, [pool._replace(waiting_blocks=2000)])) == [7]  # and 200 a second from the queue
    assert list(found.targets(40, [pool._replace(tokens_per_forward=nan)])) == [4]  # nothing says a block's forwards


@pytest.mark.parametrize("spec", ["hpa,target=16", "queued-forwards,every=3"])
def test_every_scaler_serves_a_burst_and_gives_the_same_run_again(spec: str) -> None:
    setting = Setting(parse("optimus"), load("a100-sdar-8b"))
    trace = toy_trace(np.sort(np.concatenate([np.arange(60.0), 20 + np.arange(460) * 0.02])), [200] * 520, [100] * 520)
    fleet = Fleet((Pool(setting, 1, startup=4),), routing("jsq"), scaling(spec))
    results = [simulate(trace, fleet, seed=3) for _ in range(2)]
    assert (results[0].table["status"] == 0).all()
    assert results[0].changes == results[1].changes
    assert len(results[0].changes) > 1
