"""What the live page asks: answered by a replay in the background, and only fleets of shipped policies."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from dsim.benchmarks.follow import SERVERS, pages
from dsim.engine.errors import DsimError
from dsim.following import port as live
from dsim.following.background import Background
from dsim.following.follower import Followed, Follower
from dsim.following.outlook import ask
from dsim.following.watch import Watcher
from dsim.following.windows import Scrape

ZERO = 1.8e9
OTHER = "sglang-fdfo,max_running_requests=2"


@pytest.fixture(scope="module")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watcher]:
    own = replace(SERVERS["sglang"].scenario, slos=("e2el=20s",))
    folder = tmp_path_factory.mktemp("followed")
    follower = Follower(Followed(own, ("twin",), seconds=60.0, requests=30, outlook=False), folder)
    for sample in pages(SERVERS["sglang"], own, 1.0, ZERO, 200, 1):
        follower.add(Scrape(sample.time, (sample,)))
    found = Watcher(follower, [], folder, lambda line: None)
    yield found
    found.close()


def answered(watcher: Watcher) -> dict[str, Any]:
    """The newest answer, once there is no question open."""
    while (state := json.loads(watcher.event()))["asking"]:
        time.sleep(0.05)
    found: dict[str, Any] = state["answers"][0]
    return found


def post(url: str, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urlopen(Request(f"{url}/ask", data, named)) as reply:
            return reply.status, json.loads(reply.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_question_of_the_page_is_the_replay_of_that_fleet_and_comes_by_an_event(watcher: Watcher) -> None:
    follower = watcher.follower
    with live.serving(watcher, "127.0.0.1", 0) as url:
        assert b'"ask"' in urlopen(f"{url}/").read()
        question = {"replicas": 2, "traffic": 30, "settings": OTHER}
        assert post(url, question, origin=url) == (202, {})
        status, refused = post(url, question)
        assert (status, refused["error"]) == (400, "a question is being answered, expected one at a time")
        with urlopen(f"{url}/events") as events:
            for line in events:
                if line.startswith(b"data: ") and not (event := json.loads(line[6:]))["asking"]:
                    break
    [found] = event["answers"]
    scenario = replace(follower.scenario, replicas=2, policy=OTHER)
    trace = follower.recent().time_scaled(1 / 1.3)
    assert found["question"] == f"2 replicas, 30% more traffic, {OTHER}"
    assert (found["attainment"], found["e2el_p90"]) == (
        (own := ask("", scenario, trace)).attainment,
        own.e2el_p90,
    )
    assert event["policy"] == follower.scenario.policy


def test_what_a_policy_cannot_serve_is_answered_by_its_error(watcher: Watcher) -> None:
    watcher.asked.ask({"settings": "vllm-diffusion"})
    assert "holds no law of steps a canvas" in answered(watcher)["error"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"settings": "./mine.py:NAME"}, "settings is ./mine.py:NAME, expected a preset and its fields"),
        ({"settings": "mine.toml"}, "expected a preset and its fields"),
        ({"settings": "vllm-ar,x=mine.toml"}, "expected a preset and its fields"),
        ({"settings": "vllm-ar@mine"}, "expected a preset and its fields"),
        ({"settings": "nothing"}, "expected a preset and its fields"),
        ({"settings": "vllm-ar" + ",max_num_seqs=1" * 30}, "expected a preset and its fields"),
        ({"settings": "vllm-ar,max_num_seqs=many"}, "max_num_seqs"),
        ({"settings": 3}, "settings is 3, expected text"),
        ({"replicas": 0}, "replicas is 0, expected a number from 1 to 256"),
        ({"replicas": True}, "replicas is True, expected a number"),
        ({"replicas": 1.5}, "replicas is 1.5, expected a whole number"),
        ({"traffic": "30"}, "traffic is 30, expected a number from -90 to 900"),
        ({"profile": "x"}, "the question has profile, expected replicas, traffic, settings"),
    ],
)
def test_the_page_may_ask_for_fleets_of_shipped_policies_alone(
    watcher: Watcher, body: dict[str, Any], said: str
) -> None:
    with pytest.raises(DsimError) as error:
        watcher.asked.ask(body)
    assert said in str(error.value)


def test_only_the_page_itself_asks_and_shortly(watcher: Watcher) -> None:
    with live.serving(watcher, "127.0.0.1", 0) as url:
        assert post(url, {}, origin="http://elsewhere.example")[0] == 403
        assert post(url, {}, host="elsewhere.example", origin="http://elsewhere.example")[0] == 403
        assert post(url, {}, content_type="text/plain")[0] == 415
        assert post(url, b"x" * 5000)[0] == 413
        assert post(url, b"[1]")[0] == post(url, b"{")[0] == 400


def test_before_a_window_is_judged_there_is_nothing_to_replay(tmp_path: Path) -> None:
    follower = Follower(Followed(SERVERS["sglang"].scenario, ("twin",)), tmp_path)
    with pytest.raises(DsimError, match="no window has been judged since the start"):
        Watcher(follower, [], tmp_path, lambda line: None).asked.ask({"replicas": 1})


def test_a_question_that_takes_too_long_is_ended_and_the_next_is_answered(watcher: Watcher) -> None:
    trace = watcher.follower.recent()
    background = Background(0.0)
    background.start(ask, "", watcher.follower.scenario, trace)
    assert background.busy
    assert background.poll() == [{"error": "it took more than 0 s"}]
    assert not background.busy
    assert background.poll() == []
