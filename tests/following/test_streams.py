"""Message streams: what a follower hears of a served twin, and of publishers that lose messages."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from dsim.engine.errors import DsimError
from dsim.following.follower import Followed, Follower
from dsim.following.sources.scrape import Target
from dsim.following.sources.streams import Streams
from dsim.following.watch import Watcher
from dsim.results.scenario import Scenario
from dsim.serve.open import Bounds, Outputs, open_twin

from ..held_up import PATIENCE
from ..serve.gate import Gate
from ..serve.serving import Running, serving

RECORDED = Path(__file__).parent / "recorded" / "kv_events.jsonl"
SGLANG = Scenario(trace="", policy="sglang-fdfo", profile="h100-sdar-8b/sglang")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Of the publishers that the test opens."""
    return Gate(monkeypatch)


@contextmanager
def publishing(path: Path) -> Iterator[Any]:
    """A publisher's socket in this process; it sends after a subscriber has joined, so nothing is lost."""
    socket = zmq.Context.instance().socket(zmq.XPUB)
    socket.bind(f"inproc://{path}")
    try:
        yield socket
    finally:
        socket.close(0)


def heard(streams: Streams, socket: Any, *messages: tuple[int, Any]) -> Any:
    """What the streams say of these messages: a number and a content each."""
    for number, content in messages:
        payload = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
        socket.send_multipart((b"", number.to_bytes(8, "big"), payload))
    return streams.read()


def joined(socket: Any) -> None:
    """Wait for a subscriber."""
    assert socket.poll(1000 * PATIENCE)
    socket.recv()


def forward(rows: int, seconds: float, version: int = 1) -> dict[str, Any]:
    """A forward of blocks of 4."""
    scheduled = {"num_prefill_requests": rows, "sum_prefill_tokens": 4 * rows, "sum_prefill_kv_tokens": 100 * rows}
    return {"version": version, "wall_time": seconds, "scheduled_requests": scheduled, "more": [1]}


def test_forwards_are_counted_by_rows_and_a_gap_is_a_loss(tmp_path: Path) -> None:
    with publishing(tmp_path / "x") as socket:
        streams = Streams([f"inproc://{tmp_path}/x"], [], 4)
        joined(socket)
        assert "is read anew" in heard(streams, socket, (7, forward(0, 0.0))).lost
        prompt = forward(1, 9.0)
        prompt["scheduled_requests"]["sum_prefill_tokens"] = 500
        found = heard(
            streams, socket, (8, forward(2, 0.5)), (9, forward(2, 0.25)), (10, prompt), (11, forward(1, 0.125))
        )
        assert (found.lost, found.passes) == ("", ((1, 1, 0.125, 104), (2, 2, 0.75, 416)))
        assert "sent message 13, expected 12" in heard(streams, socket, (13, forward(1, 0.5))).lost
        assert "no message of its release" in heard(streams, socket, (14, b"\x93")).lost
        assert "has version 2, expected 1" in heard(streams, socket, (15, forward(1, 1.0, 2))).lost
        streams.close()


def test_kv_events_are_counted_by_hashes_alone(tmp_path: Path) -> None:
    def stored(*names: int | bytes) -> dict[str, Any]:
        return {"type": "BlockStored", "block_hashes": names, "token_ids": [5, 6], "block_size": 2, "lora_id": None}

    with publishing(tmp_path / "x") as socket:
        streams = Streams([], [f"inproc://{tmp_path}/x"], None)
        joined(socket)
        batches: list[list[Any]] = [
            [1.0, [stored(1, 2)], 0],
            [2.0, [stored(b"long"), {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}]],
            [3.0, [stored(2), {"type": "AllBlocksCleared"}, stored(7)], None],
        ]
        found = heard(streams, socket, *enumerate(batches))
        streams.close()
    assert found.lost == ""
    assert found.blocks == {"stored": 5, "again": 1, "removed": 1, "cleared": 3, "tokens": 10, "held": 1}


def test_an_emptied_cache_is_emptied_here_too_by_the_bytes_that_vllm_sends(tmp_path: Path) -> None:
    """Recorded of vLLM 0.32, with the blocks that its pool held after each message (benchmarks/follow_kv_events.py)."""
    head, *sent = map(json.loads, RECORDED.read_text().splitlines())
    found = []
    with publishing(tmp_path / "x") as socket:
        streams = Streams([], [f"inproc://{tmp_path}/x"], None)
        joined(socket)
        for message in sent:
            _, number, payload = map(bytes.fromhex, message["frames"])
            found.append(heard(streams, socket, (int.from_bytes(number, "big"), payload)))
        streams.close()
    assert [(one.lost, one.blocks["held"]) for one in found] == [("", message["held"]) for message in sent]
    assert [message["held"] for message in sent] == [3, 7, 8, 2, 0]
    assert [one.blocks["cleared"] for one in found] == [0, 0, 0, 8, 2]
    # The first two of the five blocks, which were computed anew.
    assert (found[3].blocks["again"], found[3].blocks["tokens"]) == (2, 2 * head["block_size"])


def test_a_block_is_held_while_a_tier_holds_it(tmp_path: Path) -> None:
    def event(kind: str, medium: str) -> dict[str, Any]:
        return {"type": kind, "block_hashes": [1], "block_size": 2, "medium": medium}

    def of(*events: dict[str, Any]) -> list[Any]:
        return [1.0, [*events], 0]

    with publishing(tmp_path / "x") as socket:
        streams = Streams([], [f"inproc://{tmp_path}/x"], None)
        joined(socket)
        both = of(event("BlockStored", "GPU"), event("BlockStored", "CPU"), event("BlockRemoved", "GPU"))
        assert heard(streams, socket, (0, both)).blocks["held"] == 1
        back = heard(streams, socket, (1, of(event("BlockStored", "GPU"))))  # fetched, not computed
        assert (back.blocks["tokens"], back.blocks["again"]) == (0, 0)
        streams.close()


def test_an_address_that_is_none_is_one_line() -> None:
    with pytest.raises(DsimError, match=r"^--kv-events is here, expected ipc://FILE or tcp://HOST"):
        Streams([], ["here"], None)


def ask(server: Running, count: int, watcher: Watcher) -> None:
    """Send requests, and read the server in between."""
    lengths = np.random.default_rng(0).integers(20, 200, (count, 2)).tolist()
    with ThreadPoolExecutor(16) as pool:
        replies = []
        for prompt, answer in lengths:
            replies.append(pool.submit(server.complete, prompt=[0] * prompt, max_tokens=answer))
            watcher.once()
            time.sleep(0.05)
        assert {reply.result().status for reply in replies} == {200}
    watcher.once()


def test_a_served_twins_forwards_tell_prices_and_yield_at_the_grade_of_steps(gate: Gate, tmp_path: Path) -> None:
    gate.subscribers = 1
    base = f"ipc://{tmp_path}/fpm"
    behind = open_twin(SGLANG, Bounds(1000), speed=10.0, outputs=Outputs(forward_pass_metrics=base))
    with serving(behind) as server:
        target = Target(f"http://127.0.0.1:{server.port}")
        streams = Streams([f"{base}.0"], [], 32)
        followed = Followed(SGLANG, (target.url,), 5.0, seconds=12.0, requests=15, outlook=False)
        follower = Follower(followed, tmp_path / "followed", tell=print)
        ask(server, 90, Watcher(follower, [target], tmp_path / "followed", print, streams=streams))
        streams.close()
    records = list(follower.windows)
    assert records
    for record in records:
        assert abs(record["residuals"]["step_time"][0]) < 0.005
    assert abs(np.mean([record["residuals"]["steps_per_token"][0] for record in records])) < 0.25
    again = Follower(followed, tmp_path / "followed")
    assert [record["end"] for record in again.windows] == [record["end"] for record in records]


def test_a_served_twins_kv_events_tell_what_its_cache_holds(gate: Gate, tmp_path: Path) -> None:
    gate.subscribers = 1
    base = f"ipc://{tmp_path}/kv"
    scenario = Scenario(
        trace="", policy="vllm-diffusion,prefix_caching=true,num_pages=4000", profile="h200x2-diffusiongemma/vllm"
    )
    behind = open_twin(scenario, Bounds(1000), speed=10.0, outputs=Outputs(kv_events=base))
    with serving(behind) as server:
        target = Target(f"http://127.0.0.1:{server.port}")
        streams = Streams([], [f"{base}.0"], 256)
        followed = Followed(scenario, (target.url,), 5.0, seconds=12.0, requests=15, outlook=False)
        follower = Follower(followed, tmp_path / "followed", tell=print)
        ask(server, 90, Watcher(follower, [target], tmp_path / "followed", print, streams=streams))
        streams.close()
    cache = follower.windows[-1]["cache"]
    assert cache["stored"] > 0
    assert cache["held"] > 0
    assert 0 <= cache["reused"] < 1


def test_an_emptied_cache_of_a_served_twin_is_emptied_here_too(gate: Gate, tmp_path: Path) -> None:
    gate.subscribers = 1
    policy = "vllm-diffusion,canvas_length=8,max_num_seqs=2,num_pages=40,prefix_caching=true"
    scenario = Scenario(trace="", policy=policy, profile="h200x2-diffusiongemma/vllm")
    base = f"ipc://{tmp_path}/kv"
    behind = open_twin(scenario, Bounds(100), speed=50.0, outputs=Outputs(kv_events=base))
    engine = behind.fleet.engines[0]
    page = engine.policy.memory.page_size
    with serving(behind) as server:
        streams = Streams([], [f"{base}.0"], 8)

        def complete(name: int) -> None:
            assert server.complete(prompt=[name] * (2 * page), max_tokens=4).status == 200

        def cached() -> int:
            assert behind.fleet._prefixes is not None
            return int(behind.fleet._prefixes.cached[behind.fleet.num_requests - 1])

        complete(1)
        held = engine.idle_pages
        assert held > 0
        before, _ = arrived(streams, lambda of: of["held"] == held)
        assert before["cleared"] == 0
        assert server.ask("POST", "/reset_prefix_cache").json == {"success": True}
        assert engine.idle_pages == 0
        complete(1)  # with its step vLLM sends the event
        assert cached() == 0
        after, _ = arrived(streams, lambda of: of["cleared"] > 0 and of["held"] == engine.idle_pages)
        assert (after["cleared"], after["removed"]) == (held, 0)
        assert after["again"] > 0
        complete(1)  # the emptied cache caches
        assert cached() > 0
        streams.close()


def arrived(streams: Streams, true: Callable[[dict[str, float]], bool]) -> tuple[dict[str, float], set[str]]:
    """The counts of the messages that come until the last count is so, and what was lost."""
    total: dict[str, float] = defaultdict(float)
    lost = set()
    end = time.monotonic() + PATIENCE
    while not total or not true(total):
        assert time.monotonic() < end, total
        found = streams.read()
        lost |= {found.lost} - {""}
        for name, count in found.blocks.items():
            total[name] = count if name == "held" else total[name] + count
        time.sleep(0.01)
    return total, lost


def test_lost_events_are_asked_for_at_the_replay_socket(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsim.following.sources.streams.PATIENCE", 1000 * PATIENCE)
    policy = "vllm-diffusion,canvas_length=8,max_num_seqs=2,num_pages=40,prefix_caching=true"
    scenario = Scenario(trace="", policy=policy, profile="h200x2-diffusiongemma/vllm")
    base, again = f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/again"
    behind = open_twin(scenario, Bounds(100), speed=50.0, outputs=Outputs(kv_events=base, kv_events_replay=again))
    page = behind.fleet.engines[0].policy.memory.page_size
    with serving(behind) as server:
        for i in range(3):
            assert server.complete(prompt=[i] * (2 * page), max_tokens=4).status == 200
        whole = Streams([], [f"{base}.0"], 8, [f"{again}.0"])
        short = Streams([], [f"{base}.0"], 8)
        gate.subscribers = 2
        assert server.complete(prompt=[3] * (2 * page), max_tokens=4).status == 200
        held = behind.fleet.engines[0].idle_pages
        found, told = arrived(whole, lambda of: of["held"] == held)
        lacking, missed = arrived(short, lambda of: of["stored"] > 0)
    whole.close()
    short.close()
    assert (told, missed) == (set(), {f"--kv-events {base}.0 is read anew"})
    assert found["stored"] > lacking["stored"] > 0
