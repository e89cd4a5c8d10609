"""The page and the recommendation, in a constructed day whose answers are known."""

from pathlib import Path

import numpy as np
import pytest

from dsim.following import outlook
from dsim.following.follower import Follower
from dsim.following.outlook import Advice, WhatIf, advice, capacity, what_ifs
from dsim.following.pages import page_of
from dsim.following.watch import line_of
from dsim.results.world import World
from dsim.traces import Trace

from .day import CAPACITY, NOW, a_day, whatifs
from .pages import exposition


@pytest.fixture
def follower(tmp_path: Path) -> Follower:
    return a_day(tmp_path)


def test_the_headroom_stands_on_the_page_and_in_the_metrics_unless_the_twin_is_not_the_server(
    follower: Follower,
) -> None:
    numbers = {number.label: (number.values[0][1], number.about) for number in page_of(follower).numbers}
    assert numbers["Headroom"] == ("not known", "the twin is not the server")
    assert numbers["ttft=1s"] == ("90.0% to 95.0%", "the twin says 97.0%")
    assert "\ndsim_follow_headroom 1.0\n" not in exposition(follower, NOW)
    follower.alarms.close()
    numbers = {number.label: (number.values[0][1], number.about) for number in page_of(follower).numbers}
    assert numbers["Headroom"] == ("1.00 req/s", "of 3.00 req/s")
    assert "\ndsim_follow_headroom 1.0\n" in exposition(follower, NOW)
    assert "; step_time +16.2%; " in line_of(follower.windows[-1])  # a logarithm of 0.15


def test_the_capacity_is_the_largest_rate_that_meets_the_slos(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def ask(name: str, world: World, trace: Trace) -> WhatIf:
        asked.append(trace.rate)
        return WhatIf(name, 1, float(trace.rate <= limit), 1.0)

    monkeypatch.setattr(outlook, "ask", ask)
    world = World("azure-conv", slos=("ttft=1s",))
    trace = Trace("requests", np.arange(11.0), *np.ones((2, 11), np.int64))
    for limit in (0.1, 0.7, 1.0, 5.0):
        asked.clear()
        found = capacity(world, trace, trace.rate, 0.99)
        assert found <= limit < 1.1 * found
        assert len(asked) <= 9
    limit = 0.0
    assert capacity(world, trace, trace.rate, 0.99) == 0.0


def test_predicted_and_observed_of_a_day_are_drawn(follower: Follower) -> None:
    figure = page_of(follower).chart
    [ratio] = [line for line in figure.chart.data if line.get("name") == "e2el"]
    assert len(ratio["x"]) == 24 * 12  # a day of the 26 hours
    assert (ratio["y"][0], ratio["y"][-1]) == (1.0, 1.5)


def test_one_window_is_drawn_as_a_point_in_its_time(follower: Follower) -> None:
    while len(follower.windows) > 1:
        follower.windows.popleft()
    figure = page_of(follower).chart
    assert all(line["mode"] == "lines+markers" for line in figure.chart.data if "name" in line)
    begin, end = figure.chart.x["range"]
    assert begin < figure.chart.data[0]["x"][0] < end


def test_what_changed_names_alarms_and_profiles(follower: Follower) -> None:
    [[words]] = [section.blocks for section in page_of(follower).sections if section.title == "What changed"]
    adopted, alarm = words.lines
    assert "profile version 1, price x 1.500, from 6 windows" in adopted
    assert alarm.endswith("alarm, prices: step_time is 16% above the twin's")


def advised(*met: float, rate: float = 2.0, measured: float = 1.0, **alarms: str) -> Advice:
    return advice(whatifs(*met), CAPACITY, rate, 0.95, alarms, measured)


def test_the_recommendation_is_a_replica_more_or_to_do_nothing() -> None:
    assert advised(0.98, 0.9, 1.0).action == "Do nothing."
    missed = advised(0.90, 0.8, 1.0)
    assert missed.action == "Run 3 replicas."
    assert missed.reason.endswith("of 95.0% wanted; with one more replica 100.0% would")
    assert advised(0.98, 0.9, 1.0, rate=3.5).action == "Run 3 replicas."  # more than the fleet takes
    flags = "Check the server's flags and version."
    assert advised(0.90, 0.8, 1.0, rule="rule: queue is 50% above the twin's").action == flags
    slow = "prices: step_time is 50% above the twin's"
    assert advised(0.98, 0.9, 1.0, prices=slow).action == "Do nothing."
    lost = advised(0.98, 0.9, 1.0, prices=slow, measured=0.0)
    assert lost == Advice(flags, f"0.0% of its requests meet an SLO, and it is not as its twin: {slow}")


def test_an_slo_on_the_run_that_is_missed_asks_for_a_replica() -> None:
    world = World("azure-conv", rate=3.0, num_requests=60, slos=("p90:ttft=10ms",))
    outcomes = what_ifs(world, world.requests(), 1)
    assert [(outcome.attainment, outcome.missed) for outcome in outcomes] == [(None, "p90:ttft=10ms")] * 2
    assert advice(outcomes, None, 3.0, 0.99, {}).action == "Run 2 replicas."


def test_the_page_answers_with_the_recommendation(follower: Follower) -> None:
    follower.windows[-1]["advice"] = vars(advised(0.90, 0.8, 1.0))
    assert page_of(follower).answer.startswith("Run 3 replicas. 90.0% of requests meet the SLOs, of 95.0% wanted; ")
