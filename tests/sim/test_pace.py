"""Which of two ways to run a call is faster: measured by the clock."""

import pytest

from dsim.sim.pace import AGAIN, Pace


def test_a_pace_tries_both_ways_and_then_takes_the_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("dsim.sim.pace.perf_counter", lambda: now)
    takes = {False: 2.0, True: 1.0}  # s a request
    pace = Pace()

    def call() -> bool:
        nonlocal now
        shared = pace.shared
        pace.begin()
        now += 10 * takes[shared]
        pace.note(shared, 10)
        return shared

    assert [call() for _ in range(4)] == [False, True, True, True]
    takes = {False: 1.0, True: 3.0}  # another program needs the cores
    assert sum(call() for _ in range(AGAIN)) == 2, "noticed at once, and tried again once"
    takes = {False: 2.0, True: 1.0}  # no longer
    found = [call() for _ in range(2 * AGAIN)]
    assert found[-1], "noticed when the other way was tried again"
    assert found.count(True) >= AGAIN // 2
