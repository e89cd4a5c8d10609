"""A follower of simulated servers: what it names, what it fits, and that a kill costs nothing."""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.benchmarks.follow_changes import SERVERS, Server, joined, pages
from dsim.cli.objects import profile_name
from dsim.following.follower import Followed, Follower
from dsim.following.pages import page_of
from dsim.following.predicted import Observed, predict
from dsim.following.refit import Factors, middle, scaled
from dsim.following.sources.sample import Sample
from dsim.following.windows import Cutter, Scrape, Window
from dsim.profiler.profile import load
from dsim.report.html import to_html

from ..worlds import doubting
from .pages import exposition

ZERO = 1.8e9
SGLANG = SERVERS["sglang"]


def samples(server: Server, factors: Factors, hours: float, seed: int = 1) -> list[Sample]:
    """What the server's page shows, with its profile's steps changed."""
    world = server.world
    if factors != Factors():
        world = replace(world, profile=profile_name(replace(scaled(world.setting(), factors), name="changed")))
    return pages(server, world, server.rate, ZERO, 3600 * hours, seed)


def followed(server: Server, **how: Any) -> Followed:
    return Followed(server.world, ("twin",), **how)


@pytest.fixture(scope="module")
def as_it_is() -> list[Sample]:
    return samples(SGLANG, Factors(), 0.75)


def feed(follower: Follower, found: list[Sample]) -> list[dict[str, Any]]:
    records = (follower.add(Scrape(sample.time, (sample,))) for sample in found)
    return [record for record in records if record is not None]


def adoptions(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record["adopted"] for record in records if "adopted" in record]


@dataclass(frozen=True)
class Whole:
    """Samples, and the windows of a follower that runs without a stop."""

    found: list[Sample]
    folder: Path
    follower: Follower
    records: list[dict[str, Any]]

    @classmethod
    def of(cls, found: list[Sample], folder: Path) -> "Whole":
        follower = Follower(followed(SGLANG), folder)
        return cls(found, folder, follower, feed(follower, found))


@pytest.fixture(scope="module")
def plain(as_it_is: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole.of(as_it_is, tmp_path_factory.mktemp("plain") / "followed")


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Of a server whose steps take 1.2 times as long."""
    return Whole.of(samples(SGLANG, Factors(price=1.2), 1.7), tmp_path_factory.mktemp("slower") / "followed")


@pytest.mark.slow
def test_a_twin_of_the_same_engine_predicts_its_page(plain: Whole) -> None:
    records = plain.records
    assert len(records) == 7  # of nine windows: the first runs in the second, the last is not whole
    for name in ("step_time", "e2el", "running"):
        own = [record["residuals"][name][0] for record in records]
        assert abs(sum(own) / len(own)) < 0.05, name
    assert not any(record["raised"] for record in records)


def in_parts(folder: Path, found: list[Sample], size: int) -> list[dict[str, Any]]:
    """As `feed`, with a new follower every `size` samples, as calls of cron's are."""
    parts = [found[start : start + size] for start in range(0, len(found), size)]
    return [record for part in parts for record in feed(Follower(followed(SGLANG), folder), part)]


@pytest.mark.slow
def test_a_kill_costs_at_most_an_interval_and_a_restart_goes_on_as_if_there_was_none(plain: Whole) -> None:
    whole = plain.records
    assert in_parts(Path("cut"), plain.found, 47) == whole
    shutil.copytree(plain.folder, Path("whole"))
    assert list(Follower(followed(SGLANG), Path("whole")).windows) == whole


@pytest.mark.slow
def test_longer_steps_are_prices_and_the_profile_is_fitted_to_the_windows_since(slower: Whole) -> None:
    follower, folder, records = slower.follower, slower.folder, slower.records
    shutil.rmtree(folder)  # records name it
    assert in_parts(folder, slower.found, 31) == records  # evidence included
    assert {alarm["cause"] for record in records for alarm in record["raised"]} <= {"prices"}
    [adopted] = adoptions(records)
    assert (adopted["factors"]["price"], adopted["factors"]["steps"]) == (pytest.approx(1.2, rel=0.02), 1.0)
    profile = follower.world.loaded_profile()
    assert profile.latency.knots[0][1] > SGLANG.world.setting().profile.latency.knots[0][1]
    assert not records[-1]["alarms"]
    again = Follower(followed(SGLANG), folder)
    assert (again.version, again.world) == (1, follower.world)


@pytest.mark.slow
def test_a_flag_that_changes_while_prices_are_off_is_named_once_they_are_fitted(tmp_path: Path) -> None:
    slow = profile_name(replace(scaled(SGLANG.world.setting(), Factors(price=1.22)), name="changed"))
    flag = 30.0  # minutes
    parts = [
        pages(SGLANG, replace(SGLANG.world, profile=slow, policy=policy), SGLANG.rate, ZERO + begin, seconds, seed)
        for policy, begin, seconds, seed in
        ((SGLANG.world.policy, 0.0, 60 * flag, 1), (SGLANG.flag, 60 * flag, 3900.0, 2))
    ]  # fmt: skip
    follower = Follower(followed(SGLANG), tmp_path)
    records = feed(follower, [*joined(parts)])
    raised = [(a["cause"], (record["end"] - ZERO) / 60) for record in records for a in record["raised"]]
    [(cause, minute)] = raised  # prices that are wrong from the start are adopted by the first windows
    [adopted] = adoptions(records)
    assert cause == "rule"
    assert flag < minute <= flag + 15
    assert adopted["factors"]["price"] == pytest.approx(1.22, rel=0.02)
    assert follower.alarms.open.keys() == {"rule"}


@pytest.mark.slow
def test_the_outlook_searches_the_capacity_and_advises_by_it(as_it_is: list[Sample], tmp_path: Path) -> None:
    profile = profile_name(doubting(load("h100-sdar-8b/sglang"), "decode steps up to 256 tokens (1 sequence)"))
    server = replace(SGLANG, world=replace(SGLANG.world, profile=profile, slos=("ttft=1s", "e2el=20s")))
    follower = Follower(followed(server, attainment=0.9), tmp_path)
    last = feed(follower, as_it_is[:240])[-1]
    assert [w["name"] for w in last["what_if"]] == ["as it is", "a replica more"]
    assert last["capacity"] > last["traffic"]["rate"]  # a replica takes several times the traffic
    assert last["advice"]["action"] == "Do nothing."
    assert "in decode steps up to 256 tokens (1 sequence): 6 to 13 % too fast" in last["advice"]["reason"]
    assert Path("traffic.jsonl").exists()
    follower._capacity = 0.9
    last = feed(follower, as_it_is[240:310])[-1]  # within the hour: no search
    assert (last["capacity"], last["advice"]["action"]) == (0.9, "Run 2 replicas.")
    assert "Run 2 replicas" in to_html(page_of(follower))
    exported = exposition(follower, ZERO + 1300)
    assert 'dsim_follow_alarm{cause="prices"} 0.0' in exported
    assert f"dsim_follow_requests_rate {last['traffic']['rate']}" in exported
    assert Follower(followed(server, attainment=0.9), tmp_path).capacity == 0.9


@pytest.mark.slow
def test_a_yield_is_fitted_from_the_counter_of_steps(tmp_path: Path) -> None:
    server = SERVERS["vllm"]
    adopted = adoptions(feed(Follower(followed(server), tmp_path), samples(server, Factors(steps=1.2), 2.2)))
    assert adopted
    assert math.prod(change["factors"]["steps"] for change in adopted) == pytest.approx(1.2, rel=0.03)


def test_a_page_without_a_window_says_what_is_missing(tmp_path: Path) -> None:
    follower = Follower(followed(SGLANG), tmp_path)
    assert "No window has been judged yet" in page_of(follower).answer
    assert "\ndsim_follow_version 0.0\n" in exposition(follower, ZERO)


@pytest.mark.slow  # compiles a policy
def test_servers_together_are_a_fleet_of_as_many_replicas() -> None:
    two = Server("two", replace(SGLANG.world, replicas=2), "sglang", 2 * SGLANG.rate, "")
    found = pages(two, two.world, two.rate, ZERO, 1200, 3)
    cutter = Cutter(5.0)
    windows = [w for s in joined([found]) if (w := cutter.add(Scrape(s.time, (s,)))) is not None]
    both = [Window(tuple(replace(s, num_engines=2) for s in w.samples)) for w in windows[:2]]
    prediction = predict(SGLANG.world, SGLANG.world.setting(), Observed(both[1], both[0]))
    assert abs(prediction.residuals["e2el"][0]) < 0.15
    assert abs(prediction.residuals["step_time"][0]) < 0.05


def test_a_refit_takes_the_middle_of_the_windows_and_knows_its_error() -> None:
    rng = np.random.default_rng(0)
    fits = [middle((0.1 + 0.02 * rng.standard_normal(12)).tolist()) for _ in range(500)]
    assert np.mean([log for log, _ in fits]) == pytest.approx(0.1, abs=0.001)
    assert np.std([log for log, _ in fits]) == pytest.approx(np.mean([error for _, error in fits]), rel=0.2)
