"""What a scaler sees, and what the shipped scalers answer, by numbers written out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan

from dsim.engine.policy import parse
from dsim.sim.fleet import Fleet, Pool
from dsim.sim.routers import routing
from dsim.sim.scalers import Scaling
from dsim.sim.scalers.scaler import PoolView, Scaler
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


def watched(spec: str, arrival: list[float], prompts: list[int], outputs: list[int], count: int = 1) -> list[PoolView]:
    watcher = Watcher()
    fleet = Fleet(
        (Pool(Setting(parse(spec), toy_profile(latency=SECOND)), count),), routing("jsq"), Scaling("w", watcher)
    )
    simulate(toy_trace(arrival, prompts, outputs), fleet)
    return watcher.seen


def test_a_scaler_sees_what_waits_and_what_runs() -> None:
    # One at a time, a second a step: the first request runs from 0 to 8 s, the others wait.
    at_start, at_5, at_10, *_ = watched("ar,max_batch=1", [0, 1, 2], [10, 20, 30], [8, 4, 6])
    assert (at_start.submitted, at_start.waiting, at_start.ready) == (1, 1, 1)
    assert (at_5.submitted, at_5.completed, at_5.waiting, at_5.running) == (2, 0, 2, 1)
    assert at_5.queued_tokens == 20 + 30
    assert (at_5.waiting_blocks, at_5.running_blocks) == (4 + 6, 8 - 4)  # blocks of one token; 4 are returned at 4 s
    assert (at_5.input_length, at_5.expected_length) == (25, 5)  # of the two that came since
    assert at_5.ttft == 1  # of the first request alone
    assert all(map(isnan, (at_5.output_length, at_5.e2el, at_5.hit_rate)))
    assert (at_10.submitted, at_10.completed, at_10.output_length, at_10.e2el, at_10.itl) == (0, 1, 8, 8, 1)
    assert at_10.ttft == 9 - 1  # the second request starts at 8 s
    assert isnan(at_10.input_length)


def test_a_scaler_sees_the_steps_of_each_replica() -> None:
    _, at_5, *_ = watched("ar,max_batch=1", [0, 0, 1], [10, 20, 30], [8, 4, 6], count=2)
    # Replica 0 has a prefill of 10 and decodes; replica 1 one of 20, three decodes and, from 4 s on, the third request.
    assert at_5.loads.waiting.tolist() == [1, 0]  # the third goes to replica 0, the first of equals
    assert at_5.loads.queued_tokens.tolist() == [30, 0]
    assert at_5.loads.steps.tolist() == [4, 4]  # the step from 4 to 5 s ends after the tick
    assert at_5.loads.step_time.tolist() == [1, 1]
    assert at_5.loads.step_prefill.tolist() == [2.5, 5]
    assert at_5.loads.step_rows.tolist() == [1, 1]
    assert at_5.tokens_per_forward == 1
    assert at_5.forwards_per_block == 1
