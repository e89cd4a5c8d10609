"""A follower of simulated servers: what it names, what it fits, and that a kill costs nothing."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsim.benchmarks.follow import SERVERS, Server, joined, pages
from dsim.following.exported import METRICS, dashboard, exposition, rules
from dsim.following.follower import Followed, Follower
from dsim.following.outlook import WhatIf, shadow
from dsim.following.pages import page_of
from dsim.following.predicted import Seen, predict
from dsim.following.refit import Factors, scaled
from dsim.following.sources.sample import Sample
from dsim.following.windows import Cutter, Scrape, Window
from dsim.planner.given import name_of_profile
from dsim.profiler.profile import load
from dsim.report.html import to_html

ZERO = 1.8e9
SGLANG = SERVERS["sglang"]


def samples(server: Server, factors: Factors, hours: float, seed: int = 1) -> list[Sample]:
    """What the server's page shows, with its profile's steps changed."""
    scenario = server.scenario
    if factors != Factors():
        profile = scaled(scenario.setting(), factors)
        scenario = replace(scenario, profile=name_of_profile(replace(profile, name="changed")))
    return pages(server, scenario, server.rate, ZERO, 3600 * hours, seed)


def followed(server: Server, **how: Any) -> Followed:
    return Followed(server.scenario, ("twin",), **{"outlook": False, **how})


@pytest.fixture(scope="module")
def as_it_is() -> list[Sample]:
    return samples(SGLANG, Factors(), 0.75)


def feed(follower: Follower, found: list[Sample]) -> list[dict[str, Any]]:
    records = (follower.add(Scrape(sample.time, (sample,))) for sample in found)
    return [record for record in records if record is not None]


def test_a_twin_of_the_same_engine_predicts_its_page(as_it_is: list[Sample], tmp_path: Path) -> None:
    records = feed(Follower(followed(SGLANG), tmp_path), as_it_is)
    assert len(records) == 7  # of nine windows: the first runs in the second, the last is not whole
    for name in ("step_time", "e2el", "running"):
        own = [record["residuals"][name][0] for record in records]
        assert abs(sum(own) / len(own)) < 0.05, name
    assert not any(record["raised"] for record in records)
    assert {record["drawn"] for record in records} == {True}


def test_a_kill_costs_at_most_an_interval_and_a_restart_goes_on_as_if_there_was_none(
    as_it_is: list[Sample], tmp_path: Path
) -> None:
    whole = feed(Follower(followed(SGLANG), tmp_path / "whole"), as_it_is)
    cut = []
    for start in range(0, len(as_it_is), 107):
        cut += feed(Follower(followed(SGLANG), tmp_path / "cut"), as_it_is[start : start + 107])
    assert [record["end"] for record in cut] == [record["end"] for record in whole]
    assert [record["residuals"] for record in cut] == [record["residuals"] for record in whole]
    assert [record["smooth"] for record in cut] == [record["smooth"] for record in whole]


def test_longer_steps_are_prices_and_the_candidate_is_adopted_once_it_predicts_better(tmp_path: Path) -> None:
    found = samples(SGLANG, Factors(price=1.2), 1.7)
    follower = Follower(followed(SGLANG), tmp_path)
    records = feed(follower, found)
    raised = [alarm["cause"] for record in records for alarm in record["raised"]]
    assert set(raised) <= {"prices"}
    [version] = follower.versions
    assert version.factors.price == pytest.approx(1.2, rel=0.02)
    assert version.factors.steps == 1.0
    assert (version.grade, version.windows, version.gain > 0) == ("rates", 6, True)
    assert load(version.profile).latency.knots[0][1] > SGLANG.scenario.setting().profile.latency.knots[0][1]
    assert not records[-1]["alarms"]
    again = Follower(followed(SGLANG), tmp_path)
    assert again.versions == follower.versions
    assert again.scenario.profile == version.profile


def test_a_trace_of_the_plan_tells_what_traffic_is_other(as_it_is: list[Sample], tmp_path: Path) -> None:
    from dsim.benchmarks.follow import traffic

    plan = traffic(SGLANG.rate / 2, 600, 5)
    records = feed(Follower(followed(SGLANG, plan=plan), tmp_path), as_it_is)
    assert [a["cause"] for record in records for a in record["raised"]] == ["traffic"]
    assert "rate is" in next(a["words"] for record in records for a in record["raised"])


def test_the_outlook_names_headroom_and_one_recommendation(as_it_is: list[Sample], tmp_path: Path) -> None:
    server = replace(SGLANG, scenario=replace(SGLANG.scenario, slos=("ttft=1s", "e2el=20s")))
    follower = Follower(followed(server, outlook=True, attainment=0.9), tmp_path)
    records = feed(follower, as_it_is[:240])
    assert [w["name"] for w in records[-1]["what_if"]] == ["as it is", "a replica more", "30% more traffic"]
    assert records[-1]["headroom"]["capacity"] > SGLANG.rate
    assert records[-1]["advice"]["do"] == "Do nothing."
    assert records[-1]["shadow"] == {
        "replicas": 1, "policy": SGLANG.scenario.policy, "agrees": True, "attainment": 0.0, "gpu_hours": 0.0,
    }  # fmt: skip
    html = to_html(page_of(follower))
    assert "Is the twin right?" in html
    assert "Do nothing." in html
    said = exposition(follower, ZERO + 1300)
    assert 'dsim_follow_alarm{cause="prices"} 0' in said
    assert f"dsim_follow_requests_rate {records[-1]['traffic']['rate']:.10g}" in said


def test_the_shadow_is_the_smallest_fleet_that_meets_the_slos_or_the_best() -> None:
    def asked(*met: float) -> list[WhatIf]:
        fleets = (("as it is", 2, "a"), ("a replica less", 1, "a"), ("a replica more", 3, "a"), ("b", 2, "b"))
        return [WhatIf(*fleet, 2 * fleet[1], share, 1.0) for fleet, share in zip(fleets, met, strict=True)]

    for met, fleet, attainment, gpu_hours in (
        ((0.99, 0.90, 1.0, 1.0), (2, "a"), 0.0, 0.0),  # as good settings are no reason to change
        ((0.99, 0.95, 1.0, 1.0), (1, "a"), -0.04, 0.2),
        ((0.90, 0.80, 1.0, 0.97), (2, "b"), 0.07, 0.0),
        ((0.50, 0.30, 0.7, 0.60), (3, "a"), 0.2, -0.2),
    ):
        found = shadow(asked(*met), 0.95, 0.1)
        assert found is not None
        assert (found.replicas, found.policy, found.agrees) == (*fleet, fleet == (2, "a"))
        assert (found.attainment, found.gpu_hours) == pytest.approx((attainment, gpu_hours))


def test_the_dashboard_and_the_alert_rules_name_metrics_of_the_table_alone() -> None:
    known = {f"dsim_follow_{metric.name}" for metric in METRICS}
    panels = json.loads(dashboard())["panels"]
    assert {panel["targets"][0]["expr"] for panel in panels} == known
    groups = yaml.safe_load(rules())["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    assert {rule["expr"].split(" ")[0] for rule in found} <= known
    assert all({"alert", "expr", "for", "labels", "annotations"} == rule.keys() for rule in found)


def test_a_yield_is_fitted_from_the_counter_of_steps(tmp_path: Path) -> None:
    server = SERVERS["vllm"]
    found = samples(server, Factors(steps=1.2), 2.2)
    follower = Follower(followed(server), tmp_path)
    feed(follower, found)
    assert follower.versions
    assert math.prod(v.factors.steps for v in follower.versions) == pytest.approx(1.2, rel=0.03)


def test_a_page_without_a_window_says_what_is_missing(tmp_path: Path) -> None:
    follower = Follower(followed(SGLANG), tmp_path)
    assert "No window has been judged yet" in page_of(follower).answer
    assert "dsim_follow_grade 0" in exposition(follower, ZERO)


def test_servers_together_are_a_fleet_of_as_many_replicas(tmp_path: Path) -> None:
    two = Server("two", replace(SGLANG.scenario, replicas=2), "sglang", 2 * SGLANG.rate, "")
    found = pages(two, two.scenario, two.rate, ZERO, 1200, 3)
    cutter = Cutter(5.0)
    windows = [w for s in joined([found]) if (w := cutter.add(Scrape(s.time, (s,)))) is not None]
    both = [Window(tuple(replace(s, num_engines=2) for s in w.samples)) for w in windows[:2]]
    prediction = predict(SGLANG.scenario, SGLANG.scenario.setting(), Seen(both[1], None, before=Seen(both[0], None)))
    assert abs(prediction.residuals["e2el"][0]) < 0.15
    assert abs(prediction.residuals["step_time"][0]) < 0.05
