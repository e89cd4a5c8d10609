"""Turns of a session that wait for each other."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsim.engine.policy import parse
from dsim.sim.setting import Setting
from dsim.sim.twin import RunRecords, simulate
from dsim.traces import Trace

from ..worlds import SECOND, Collector, differences, toy_profile

PROFILE = toy_profile(latency=SECOND)


def chats(*rows: tuple[float, Any, int, int]) -> Trace:
    arrival, sessions, prompts, answers = zip(*rows, strict=True)
    return Trace("chats", np.array(arrival), np.array(prompts), np.array(answers), {"session_id": list(sessions)})


def run(trace: Trace, spec: str = "ar,max_batch=4", **how: Any) -> RunRecords:
    return simulate(trace, Setting(parse(spec), PROFILE), sessions=True, **how)


# A step takes 1 s: a prompt's gives the first token, and each token after it takes another.
TRACE = chats((0.0, "a", 10, 3), (1.0, "a", 20, 2), (1.5, "b", 10, 1), (1.7, "a", 30, 1), (30.0, "a", 40, 1))


def test_a_turn_is_not_sent_before_the_turn_before_has_ended() -> None:
    table = run(TRACE).table
    assert table["finish"].tolist() == [4.0, 6.0, 3.0, 7.0, 31.0]  # b's prompt stops the others for a second
    # The second turn is sent at the first one's end, the third at the second's, and the last at its own time.
    assert table["arrival"].tolist() == [0.0, 4.0, 1.5, 6.0, 30.0]
    assert run(replace(TRACE, extras={"session_id": [None] * 5})).table["arrival"].tolist() == TRACE.arrival.tolist()


def test_who_waits_for_a_request_that_is_rejected_waits_no_longer() -> None:
    trace = chats((0.0, "a", 10, 3), (1.0, "a", 900_000, 1), (2.0, "a", 20, 1))
    table = run(trace).table
    assert table["status"].tolist() == [0, 1, 0]
    assert table["arrival"].tolist() == [0.0, 3.0, 3.0]


@pytest.mark.parametrize("router", ["round-robin", "least-tokens", "prefix"])
def test_a_journal_of_sessions_on_several_replicas_replays_plan_for_plan(router: str) -> None:
    rng, journal = np.random.default_rng(3), Collector()
    rows = [(t * 0.9371, int(rng.integers(0, 5)), int(rng.integers(1, 40)), int(rng.integers(1, 9))) for t in range(40)]
    trace = chats(*rows)
    result = run(trace, replicas=2, router=router, append=journal)
    assert differences(Setting(result.policy, PROFILE), result, journal) == []
    last: dict[int, float] = {}
    late = 0
    for i, (time, session, _, _) in enumerate(rows):
        assert result.table["arrival"][i] == max(time, last.get(session, 0.0))
        late += result.table["arrival"][i] > time
        last[session] = float(result.table["finish"][i])
    assert late > 5
