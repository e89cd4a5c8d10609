"""`dsim follow` from its words to its folder."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

import dsim as package
from dsim.following.exported import serve
from dsim.following.follower import Followed, Follower
from dsim.following.lines import Lines
from dsim.following.sources.engines import sample_of
from dsim.following.sources.scrape import Target
from dsim.following.watch import Watcher
from dsim.following.windows import Scrape
from dsim.results.world import World

from ..checks import cases
from ..cli.command import dsim, succeed
from ..serve.serving import until
from . import pages
from .pages import exposition

POLICY, PROFILE = "vllm-diffusion", "h200x2-diffusiongemma/vllm"
WORDS = f"--policy {POLICY} --profile {PROFILE}"


def test_once_reads_a_sample_and_the_next_goes_on() -> None:
    page = [pages.vllm(10)]
    with pages.showing(page) as (url, asked):
        assert succeed("follow", url, WORDS, "--once --json").json["open"] is None
        page[0] = pages.vllm(30)
        assert dsim(f"follow {url}?token=secret --once --json", WORDS).json["open"]["requests"] == 20
        assert [request["path"] for request in asked] == ["/metrics", "/metrics?token=secret"]  # one GET a reading
    assert not any("secret" in path.read_text() for path in Path("followed").rglob("*.*"))
    assert sorted(os.listdir("followed")) == ["alerts.yml", "follow.json", "report.html", "samples.jsonl"]
    other = dsim("follow", url, f"--profile {PROFILE} --policy vllm-diffusion:4 --once")
    assert "follows policy vllm-diffusion, expected vllm-diffusion:4" in other.refusal


@cases(
    "words said",
    ("ftp://here", "URL is ftp://here, expected http://HOST:PORT or https://HOST:PORT"),
    ("http://[::1", "URL is http://[::1 (Invalid IPv6 URL), expected http://HOST:PORT"),
    ("http://a:b", "URL is http://a:b (Port could not be cast to integer value as 'b'), expected http://HOST"),
    ("http://me:word@a", "URL is http://a with a user's name, expected http://HOST:PORT"),
    ("http://127.0.0.1:9 --once", "127.0.0.1:9/metrics: does not answer, expected the metrics of a server"),
    ("http://a http://a", "2 URLs are given, 1 of them different, expected each once"),
    ("http://a --interval 0", "--interval is 0.0, expected 0.1 to 86400"),
    ("http://a --min-requests 0", "--min-requests is 0, expected 1 to 1000000"),
    ("http://a --once --port 1", "--once is given and --port is 1, expected one of them"),
    ("http://a --token-file none", "none: cannot be read: No such file or directory"),
    ("http://a --profile a100-sdar-8b", "profile a100-sdar-8b holds no law of steps a canvas"),
)  # fmt: skip
def test_a_mistake_is_one_line(words: str, said: str) -> None:
    assert said in dsim("follow", WORDS, words).refusal


def test_a_mistyped_server_is_mended_in_the_same_folder() -> None:
    assert "does not answer" in dsim("follow http://127.0.0.1:9 --once", WORDS).refusal
    with pages.showing([pages.vllm()]) as (url, _):
        succeed("follow", url, WORDS, "--once")
    refused = dsim("follow http://127.0.0.1:9 --once", WORDS).refusal
    assert "expected ['http://127.0.0.1:9/metrics']: choose another folder" in refused


def test_a_taken_port_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = dsim("follow http://127.0.0.1:9", WORDS, "--port", port)
    assert found.refusal == f"--port is {port}, expected one that is free on 127.0.0.1"


def test_a_server_that_is_gone_for_a_while_ends_nothing(tmp_path: Path) -> None:
    page, told = [pages.vllm(5)], []
    with pages.showing(page) as (url, _):
        target = Target(url)
        follower = Follower(Followed(World(trace="", policy=POLICY, profile=PROFILE), (target.url,)), tmp_path)
        watcher = Watcher(follower, [target], tmp_path, told.append)
        watcher.once()
        page[0] = "nothing 1\n"
        watcher.once()
        page[0] = pages.vllm(6)
        watcher.once()
    assert len(told) == 1
    assert "expected the metrics of an engine" in told[0]
    assert 'dsim_follow_up{url="' + target.url + '"} 1.0' in exposition(follower, time.time())


def test_prometheus_reads_the_metrics_from_the_port(tmp_path: Path) -> None:
    world = World(trace="", policy=POLICY, profile=PROFILE)
    url = serve(Follower(Followed(world, ("here",)), tmp_path), "127.0.0.1", 0)
    assert "dsim_follow_version 0.0" in urlopen(url).read().decode()


def test_a_window_that_no_twin_can_replay_ends_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    world = World(trace="", policy=POLICY, profile=PROFILE)
    follower = Follower(Followed(world, ("here",), 1000.0, 10, 10), tmp_path, tell=told.append)
    for i in range(3):
        tokens = 'generation_tokens_total{engine="0",model_name="m"} '
        sample = sample_of(pages.vllm(10 + 20 * i).replace(tokens, tokens + "9" * 4 * i), 2e9 + 50 * i, "here")
        assert follower.add(Scrape(sample.time, (sample,))) is None
    assert [line[:58] for line in told] == ["Not judged: followed traffic: none of its 45 requests fits"]


@cases("cut", *range(1, 12))
def test_a_kill_anywhere_in_a_line_loses_that_line_alone(cut: int) -> None:
    path = Path("lines.jsonl")
    lines = Lines(path, 4)
    for i in range(3):
        lines.append({"number": i})
    path.write_bytes(path.read_bytes()[:-cut])
    again = Lines(path, 4)
    assert [line["number"] for line in again] == [0, 1]
    for i in range(3, 9):
        again.append({"number": i})
    assert [line["number"] for line in again] == [5, 6, 7, 8]  # of eight the oldest four went


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_at_most_one_reading() -> None:
    command = f"-m dsim follow {{}} {WORDS} --interval 0.1 -o killed"
    with pages.showing([pages.vllm()]) as (url, asked):
        for kill in range(3):
            before = len(asked)
            with subprocess.Popen([sys.executable, *command.format(url).split()], stdout=subprocess.PIPE) as run:
                until(lambda before=before, kill=kill: len(asked) > before + 3 + kill)
                time.sleep(0.03 * kill)
                run.send_signal(signal.SIGKILL)
            kept = list(Lines(Path("killed") / "samples.jsonl", 1 << 20))
            assert len(asked) - (kill + 1) <= len(kept) <= len(asked)
        succeed("follow", url, WORDS, "-o killed --once --json")


def test_from_python_it_is_a_function() -> None:
    with pages.showing([pages.vllm()]) as (url, _):
        found = package.follow(url, "vllm-diffusion", profile="h200x2-diffusiongemma/vllm", out="f", once=True)
    assert (found.state["version"], found.windows) == (0, [])
    assert json.loads(Path("f/follow.json").read_text())["schema"] == "dsim-follow"
