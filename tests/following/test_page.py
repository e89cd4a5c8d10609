"""The page and the recommendation, in a constructed day whose answers are known."""

from pathlib import Path

import pytest

from dsim.following.exported import exposition
from dsim.following.follower import Follower
from dsim.following.outlook import Advice, advice, what_ifs
from dsim.following.pages import page_of
from dsim.following.watch import line_of
from dsim.report.page import Figure, Page, Section, Words
from dsim.results.scenario import Scenario

from .day import NOW, ROOM, a_day, whatifs


@pytest.fixture
def follower(tmp_path: Path) -> Follower:
    return a_day(tmp_path)


def section(page: Page, title: str) -> Section:
    return next(own for own in page.sections if own.title == title)


def test_headroom_and_what_binds_stand_on_the_page_and_in_the_metrics(follower: Follower) -> None:
    numbers = {number.label: (number.values[0][1], number.about) for number in page_of(follower).numbers}
    assert numbers["Headroom"] == ("1.00 req/s", "of 3.00 req/s")
    assert numbers["What binds"] == ("memory", "ttft=1s")
    assert numbers["ttft=1s"] == ("90.0% to 95.0%", "the twin says 97.0%")
    assert "dsim_follow_headroom 1" not in exposition(follower, NOW)  # an alarm is open: the twin is not the server
    follower.windows[-1] |= {"headroom": None, "no_headroom": "the twin is not the server"}
    assert {n.label: n.about for n in page_of(follower).numbers}["Headroom"] == "the twin is not the server"
    follower.alarms.close()
    said = exposition(follower, NOW)
    assert "\ndsim_follow_headroom 1\n" in said
    assert "; step_time +16.2%; " in line_of(follower.windows[-1])  # a logarithm of 0.15


def test_predicted_and_observed_of_a_day_are_drawn(follower: Follower) -> None:
    shown = {b.name: b for b in section(page_of(follower), "Is the twin right?").blocks if isinstance(b, Figure)}
    [ratio] = [line for line in shown["predicted"].chart.data if line.get("name") == "e2el"]
    assert len(ratio["x"]) == 24 * 12  # a day of the 26 hours
    assert (ratio["y"][0], ratio["y"][-1]) == (1.0, 1.5)


def test_one_window_is_drawn_as_a_point_in_its_time(follower: Follower) -> None:
    while len(follower.windows) > 1:
        follower.windows.popleft()
    page = page_of(follower)
    shown = {b.name: b for b in section(page, "Is the twin right?").blocks if isinstance(b, Figure)}
    for figure in shown.values():
        assert all(line["mode"] == "lines+markers" for line in figure.chart.data if "name" in line)
        begin, end = figure.chart.x["range"]
        assert begin < figure.chart.data[0]["x"][0] < end


def test_what_changed_names_alarms_and_profiles(follower: Follower) -> None:
    [words] = section(page_of(follower), "What changed").blocks
    assert isinstance(words, Words)
    assert len(words.lines) == 2
    assert "profile version 1, price x 1.500, from 6 windows" in words.lines[0]
    assert words.lines[1].endswith("alarm, prices: step_time is 16% above the twin's")


def advised(*met: float, rate: float = 2.0, measured: float = 1.0, **alarms: str) -> Advice:
    return advice(whatifs(*met), ROOM, rate, 0.95, alarms, measured, (1.0, 4) if measured < 1 else None)


def test_the_recommendation_is_a_replica_more_or_to_do_nothing() -> None:
    assert advised(0.98, 0.9, 1.0).do == "Do nothing."
    missed = advised(0.90, 0.8, 1.0)
    assert (missed.do, missed.gain) == ("Run 3 replicas.", "90.0% to 100.0% of requests within the SLOs")
    assert advised(0.98, 0.9, 1.0, rate=3.5).do == "Run 3 replicas."  # more than the fleet takes
    assert advised(0.90, 0.8, 1.0, rule="rule: queue is 50% above the twin's").do.startswith("Check the server's flags")
    slow = "prices: step_time is 50% above the twin's"
    assert advised(0.98, 0.9, 1.0, prices=slow).do == "Do nothing."
    lost = advised(0.98, 0.9, 1.0, prices=slow, measured=0.0)
    assert lost.do.startswith("Check the limit of running requests (1 while others wait, not 4)")
    assert lost.why == f"0.0% of its requests meet an SLO, and it is not as its twin: {slow}"


def test_an_slo_on_the_run_that_is_missed_asks_for_a_replica() -> None:
    asked = Scenario("azure-conv", rate=3.0, num_requests=60, slos=("p90:ttft=10ms",))
    found = what_ifs(asked, asked.requests(), 1)
    assert [(one.attainment, one.missed) for one in found] == [(None, "p90:ttft=10ms")] * 3
    assert advice(found, None, 3.0, 0.99, {}).do == "Run 2 replicas."


def test_the_page_shows_the_recommendation(follower: Follower) -> None:
    follower.windows[-1]["advice"] = vars(advised(0.90, 0.8, 1.0))
    [words] = section(page_of(follower), "Recommendation").blocks
    assert isinstance(words, Words)
    assert words.lines[0] == "Run 3 replicas."
    assert [line.partition(":")[0] for line in words.lines[1:]] == ["Gain", "Evidence"]
