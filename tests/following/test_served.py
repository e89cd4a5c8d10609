"""A follower of `dsim serve`, end to end: the twin's page over HTTP, read by its own clock."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dsim.following.follower import Followed, Follower
from dsim.following.sources.scrape import Target
from dsim.following.watch import Watcher
from dsim.results.world import World
from dsim.serve.open import open_twin

from ..serve.serving import serving


@pytest.mark.slow
def test_the_page_of_a_served_twin_is_as_its_twin_says(tmp_path: Path) -> None:
    world = World(trace="", policy="chunk:8", profile="a100-sdar-8b")
    with serving(open_twin(world, speed=10.0)) as server:
        target = Target(f"http://127.0.0.1:{server.port}")
        followed = Followed(world, (target.url,), 5.0, seconds=20.0, requests=15)
        watcher = Watcher(Follower(followed, tmp_path), [target], tmp_path, lambda line: None)
        clients = []
        for i in range(45):
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
    assert Path("report.html").read_text().startswith("<!DOCTYPE html>")
    again = Follower(replace(followed), tmp_path)
    assert [record["end"] for record in again.windows] == [record["end"] for record in records]
