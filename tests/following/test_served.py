"""A follower of `dsim serve`, end to end: the twin's page over HTTP, read by its own clock, and its access log."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from dsim.following import port as live
from dsim.following.follower import Followed, Follower
from dsim.following.sources.growing import AccessLog as Growing
from dsim.following.sources.scrape import Target
from dsim.following.watch import Watcher
from dsim.results.world import World
from dsim.serve.fleet import AccessLog
from dsim.serve.open import open_twin

from ..serve.serving import serving

REQUESTS = 45


@pytest.mark.slow
def test_the_page_of_a_served_twin_is_as_its_twin_says(tmp_path: Path) -> None:
    world = World(trace="", policy="chunk:8", profile="a100-sdar-8b")
    behind, log = open_twin(world, speed=10.0), tmp_path / "access.jsonl"
    behind.fleet.access = AccessLog(log, behind.fleet.clock.opened)
    with serving(behind) as server:
        target = Target(f"http://127.0.0.1:{server.port}")
        followed = Followed(world, (target.url,), 5.0, seconds=20.0, requests=15, outlook=False)
        growing = Growing(log, None, None, None)
        watcher = Watcher(Follower(followed, tmp_path, growing), [target], tmp_path, lambda line: None)
        clients = []
        for i in range(REQUESTS):
            body = {"prompt": "x" * (50 + 7 * i % 200), "max_tokens": 40 + 13 * i % 60}
            clients.append(threading.Thread(target=lambda body=body: server.complete(**body)))
            clients[-1].start()
            watcher.once()
            time.sleep(0.1)  # about 1 s of the twin's
        for client in clients:
            client.join()
        watcher.once()
    records = list(watcher.follower.windows)
    assert records
    for record in records:
        assert abs(record["residuals"]["step_time"][0]) < 0.15
        assert record["requests"] >= 15
        assert not record["drawn"]
    assert watcher.follower.last is not None
    assert 'dsim_follow_up{url="' in watcher.metrics
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    with live.serving(watcher, "127.0.0.1", 0) as url:
        assert urlopen(f"{url}/").read().decode() == watcher.page
        assert urlopen(f"{url}/metrics").read().decode() == watcher.metrics
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{url}/follow.json")
    again = Follower(replace(followed), tmp_path)
    assert [record["end"] for record in again.windows] == [record["end"] for record in records]
