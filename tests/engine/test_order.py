"""A scheduler in plain Python: what it sees of the requests that wait, and the order in which they are let in."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dsim.engine.allowed_code import allowed
from dsim.engine.engine import Engine, Limits
from dsim.engine.journal import RequestTable
from dsim.engine.part import Discipline, Policy
from dsim.engine.policies.lmdeploy_2025 import Continuous
from dsim.engine.replay import replay
from dsim.engine.request import Request
from dsim.engine.spec import parse
from dsim.engine.view import View, class_of
from dsim.sim.setting import Setting
from dsim.sim.twin import simulate

from ..worlds import Collector, toy_profile, toy_trace

EXAMPLE = Path(__file__).parents[2] / "examples" / "policies" / "dws.py"
DWS = f"{EXAMPLE}:POLICY,max_batch=1,num_pages=64,block_length=4,size=4"
ONE = Limits(64, 4096, 1)


@dataclass(frozen=True)
class Asked(Discipline):
    """A discipline that a test answers for."""

    def order(self, view: View) -> Any:
        return ANSWER[0](view.waiting(), view.now)


ANSWER: list[Any] = [None]


def test_a_scheduler_sees_all_that_is_known_of_a_request_that_waits() -> None:
    seen: list[tuple[float, dict[str, Any]]] = []

    def looks(waiting: Any, now: float) -> Any:
        seen.append((now, {name: column.tolist() for name, column in waiting._asdict().items()}))
        return np.arange(len(waiting.index))

    ANSWER[0] = looks
    engine = Engine(Policy("asked", Continuous(num_loops=1), discipline=Asked()), ONE, RequestTable(2))
    engine.submit(Request(0, 1.0, 30, 40, 64, priority=3, slo_class="chat"))
    engine.submit(Request(1, 2.5, 20, 40, estimate=70, deadline=9.0))
    engine.schedule(4.0)
    assert seen == [
        (4.0, {
            "index": [0, 1], "arrival": [1.0, 2.5], "age": [3.0, 1.5], "slo_class": [class_of("chat"), 0],
            "deadline": [float("inf"), 11.5], "priority": [3, 0], "prompt": [30, 20], "estimate": [64, 70],
            "emitted": [0, 0],
        })
    ]  # fmt: skip


def begun(trace: Any, spec: str = DWS, **how: Any) -> list[int]:
    """The requests of a run in the order in which they began."""
    profile = toy_profile()
    policy = parse(spec, allowed([EXAMPLE])) if isinstance(spec, str) else spec
    table = simulate(trace, Setting(policy, profile), **how).table
    return np.argsort(table["scheduled"], kind="stable").tolist()


def test_the_shortest_waits_least_until_the_long_one_has_waited_long_enough() -> None:
    trace = toy_trace([0.0, 1.0, 2.0, 3.0, 300.0], [8] * 5, [8, 40, 16, 4, 4])
    assert begun(trace) == [0, 3, 2, 1, 4]
    assert begun(trace, DWS.replace("max_batch", "patience=0.05,max_batch")) == [0, 1, 2, 3, 4]  # first come
    guess = replace(trace, extras={"estimated_length": [8, 4, 16, 40, 4]})
    assert begun(guess) == [0, 1, 2, 3, 4]  # by the estimate, whatever the truth is


def test_priorities_and_deadlines_of_a_trace_reach_the_scheduler_and_its_journal_replays() -> None:
    wishes = {"priority": [0, 2, None, -1, 1], "deadline": [None, 3.0, 90.0, 50.0, 4.0]}
    trace = replace(toy_trace([0.0] * 5, [8] * 5, [8] * 5), extras=wishes)
    policy = Policy("asked", Continuous(num_loops=1, max_batch=1), discipline=Asked())
    for name, order in (("priority", [3, 0, 2, 4, 1]), ("deadline", [1, 4, 3, 2, 0])):
        ANSWER[0] = lambda waiting, now, name=name: np.argsort(getattr(waiting, name), kind="stable")
        profile, journal = toy_profile(), Collector()
        result = simulate(trace, Setting(policy, profile), append=journal)
        assert np.argsort(result.table["scheduled"], kind="stable").tolist() == order
        engine = Engine(policy, result.limits, RequestTable(5), latency=profile.latency)
        assert list(replay(engine, 0, result.table.columns, journal.steps, journal.lists)) == []
